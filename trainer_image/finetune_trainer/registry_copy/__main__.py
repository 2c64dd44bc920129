"""`finetune-copy`: download a version with its lineage into the shared folder, or upload the folder as a version of another registry.

Each of the two steps is a container of its own, with the login of one server.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from finetune_crds import contract
from finetune_trainer.pod import exit_status, library_variables
from finetune_trainer.registry_copy import download, publish

ENV_FOLDER = "FINETUNE_COPY_PATH"


def main(arguments: list[str] | None = None) -> int:
    """Take one of the two steps, write a termination message after an error, and return the exit code."""
    options = _parse(arguments)
    library_variables.set_defaults()
    exit_status.exit_on_sigterm()
    folder = Path(os.environ.get(ENV_FOLDER, contract.COPY_PATH))
    if options.source_model:
        return exit_status.run(partial(download.download, options.source_model, folder))
    destination = publish.Destination(
        model=options.model,
        run_id=os.environ.get("MLFLOW_RUN_ID", ""),
        source=options.source,
        digest=options.digest,
    )
    return exit_status.run(partial(publish.publish, folder, destination))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune-copy",
        description="Copy a model version from one MLflow registry to another.",
    )
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument(
        contract.COPY_FROM,
        dest="source_model",
        help="download this version, for example models:/name/3, from the server MLFLOW_TRACKING_URI",
    )
    step.add_argument(
        contract.COPY_TO,
        dest="model",
        help="upload the downloaded version as a version of this model to the server MLFLOW_TRACKING_URI",
    )
    parser.add_argument(
        contract.COPY_ADDRESS, dest="source", default="", help="the address of the source, for the lineage"
    )
    parser.add_argument(
        contract.COPY_DIGEST,
        dest="digest",
        default="",
        help="the identity of the source's version, the tag of its copy",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
