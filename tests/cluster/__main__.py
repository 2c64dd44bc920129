"""The command line: `python -m cluster up|down|status|kubeconfig|images|release|readme|node|prune`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from cluster import backends, binaries, builder, images, local, readme, registry, snapshots, supervisor
from cluster.binaries import say
from cluster.paths import ClusterError, clusters
from cluster.release.make import make
from cluster.release.target import Target
from support.cache import cache
from support.waiting import WaitError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "supervise":
            supervisor.main(options.name, options.pause)
        elif options.command == "node":
            local.ask(options.name, options.verb, options.node)
        elif options.command == "release":
            target = Target.of(options.registry, options.version)
            print(make(target, options.base, options.cuda, options.platform))
        elif options.command == "readme":
            (readme.check if options.check else readme.write)()
        elif options.command == "prune":
            _prune()
        else:
            _on_backend(options)
    except (ClusterError, WaitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _on_backend(options: argparse.Namespace) -> None:
    chosen, why = backends.choose()
    backend = backends.BACKENDS[chosen]
    if options.command == "up":
        say(why)
        print(backend.up(options.name, options.nodes))
    elif options.command == "down":
        backend.down(options.name)
    elif options.command == "kubeconfig":
        status = backend.status(options.name)
        if not status.get("kubeconfig"):
            raise ClusterError(f"cluster {options.name} is not up: `make demo` brings it up")
        print(status["kubeconfig"])
    elif options.command == "status":
        print(json.dumps(backend.status(options.name), indent=2))
    else:
        say(why)
        selected_images = [
            image for image in images.PROJECT if not options.only or _short(image) in options.only
        ]
        references = backend.build_images(options.name, selected_images)
        if options.json:
            print(json.dumps(references, indent=2))
        else:
            print("\n".join(f"{name}={reference}" for name, reference in references.items()))


def _short(image: images.Image) -> str:
    return image.variable.removeprefix("IMAGE_").lower()


def _prune() -> None:
    if clusters().exists() and any(each.is_dir() for each in clusters().iterdir()):
        raise ClusterError("clusters use the images: take them down first")
    with snapshots.lock():
        for folder in (
            registry.storage(),
            snapshots.store(),
            builder.folder(),
            cache() / "build",
            cache() / "classes",
        ):
            if folder.exists():
                say(f"removing {folder}")
                # NB: under another name at once: what is half removed must not look complete.
                local.remove(folder)
    binaries.remove_unused()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description="A Kubernetes for the tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring a cluster up and print its kubeconfig's path")
    up.add_argument("--nodes", type=int, default=2)
    down = commands.add_parser("down", help="take a cluster away, and everything it left on this machine")
    kubeconfig = commands.add_parser("kubeconfig", help="print the path of a cluster's kubeconfig")
    status = commands.add_parser("status", help="print what there is of a cluster, as JSON")
    built = commands.add_parser("images", help="build the project's images and give them to a cluster")
    built.add_argument("--json", action="store_true")
    built.add_argument("--only", nargs="+", choices=[_short(image) for image in images.PROJECT], default=[])
    node = commands.add_parser(
        "node", help="start, stop or crash a node of a local cluster, or crash a process"
    )
    node.add_argument("verb", choices=("start", "stop", "crash"))
    node.add_argument("node", help="a node (demo-2), or to crash: kube-apiserver, etcd, coredns, ...")
    inner = commands.add_parser("supervise")
    inner.add_argument("--pause", required=True)
    for command in (up, down, kubeconfig, status, built, node, inner):
        command.add_argument("--name", default="demo")
    release = commands.add_parser(
        "release", help="build and push images and chart, and print the folder of the release"
    )
    release.add_argument("--registry", required=True, help="http:// before it: without TLS")
    release.add_argument("--version", required=True)
    release.add_argument("--base", required=True, help="base image, or stand-in for one that is built here")
    release.add_argument(
        "--cuda", required=True, help="CUDA version of the trainer's second image, such as cu130"
    )
    release.add_argument("--platform", required=True, help="platform of the images, such as linux/amd64")
    written = commands.add_parser("readme", help="write the chart's README.md")
    written.add_argument("--check", action="store_true", help="write nothing, and fail if it is stale")
    commands.add_parser(
        "prune", help="remove all images, what they were built from, and programs that are not used"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
