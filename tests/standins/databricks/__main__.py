"""`python -m standins.databricks`: a stand-in workspace for a demo, until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import threading

from standins.databricks import Workspace, running


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="standins.databricks", description="A stand-in Databricks workspace on loopback."
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--token", default="dapi-good", help="the personal access token that is accepted")
    parser.add_argument(
        "--polls", type=int, default=3, help="how often an endpoint is asked before it is ready"
    )
    parser.add_argument(
        "--version",
        action="append",
        default=[],
        metavar="MODEL:NUMBER",
        help="a version of a model, catalog.schema.name:1; may be repeated",
    )
    options = parser.parse_args()
    state = Workspace(tokens={options.token})
    state.endpoints.polls = options.polls
    for item in options.version:
        model, _, number = item.rpartition(":")
        state.add_version(model, int(number))
    with running(state, options.port), contextlib.suppress(KeyboardInterrupt):
        print(state.uri, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
