"""The images that run in a cluster: what stands in for public ones, and the project's own.

Every image is tagged by what it is made of, so what has not changed is not built again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import binaries, builder, image_store, machine, packages, snapshots
from cluster.binaries import say
from cluster.paths import REPOSITORY, ClusterError
from support.cache import cache
from support.process import ASIDE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CODENAME = "bookworm"
BASE_PACKAGES = (
    "ca-certificates",
    "python3",
    "python3-pip",
    "python3-venv",
    "libpython3-dev",
    "tzdata",
    "netbase",
)
# Builds mount this machine's uv cache here. NB: not at /root/.cache/uv, where a cache mount of the Dockerfile may hide it.
UV_CACHE = "/uv-cache"
SKIPPED = {"__pycache__", ".venv", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache"}

# Makes Debian's Python behave like that of python:3.11-slim: the names of its programs, and pip without its warning.
BASE_HOOK = """\
set -e
mkdir -p "$1/usr/local/bin"
for name in python python3 pip pip3; do
    case $name in python*) ln -sf /usr/bin/python3 "$1/usr/local/bin/$name";;
    *) ln -sf /usr/bin/pip3 "$1/usr/local/bin/$name";; esac
done
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
chroot "$1" update-ca-certificates >/dev/null 2>&1
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin
find "$1"/usr/share/doc "$1"/usr/share/man -type f ! -name copyright -delete
"""

# NB: mmdebstrap keeps the options of dpkg in the image: apt does not wait for the disk there either.
BOOTSTRAP_OPTIONS = ("--variant=minbase", "--dpkgopt=force-unsafe-io")

BASE_DOCKERFILE = """\
FROM scratch
ADD base.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python3"]
"""


@dataclass(frozen=True)
class Image:
    """An image of the project: the variable its reference goes by, and what it is built from.

    `arguments` are those of its build, NAME=value each.
    """

    variable: str
    name: str
    dockerfile: str
    target: str | None = None
    arguments: tuple[str, ...] = ()


PROJECT = (
    Image("IMAGE_OPERATOR", "finetune-operator", "operator/Dockerfile"),
    Image("IMAGE_PREP", "finetune-prep", "trainer_image/Dockerfile", "prep"),
    Image("IMAGE_TRAINER", "finetune-trainer", "trainer_image/Dockerfile", "trainer"),
)


# The variable that the S3 server's reference goes by.
OBJECT_STORE = "IMAGE_VERSITYGW"


def pause() -> str:
    """The image that holds pods' namespaces."""
    return builder.program("pause", binaries.ensure("pause")["pause"], ["/pause"])


def versitygw() -> str:
    """An S3 server over a folder, run by any user who may write there.

    In a pod:

        args: ["--port", ":7070", "/data"]
        env: ROOT_ACCESS_KEY, ROOT_SECRET_KEY; /data an emptyDir or a claim

    Each bucket is a folder of /data, made by CreateBucket. Metadata goes into extended attributes (user.*): the
    disk has them in emptyDir and in claims; an emptyDir in memory has them from Linux 6.6 on.
    """
    return builder.program("versitygw", binaries.ensure("versitygw")["versitygw"], ["/versitygw"])


def base() -> str:
    """The tag of the image that stands in for python:3.11-slim, built if it is missing."""
    sources, settings, trusted = (
        machine.debian_sources(CODENAME),
        machine.apt_settings(),
        machine.certificates(),
    )
    content = hashlib.sha256(
        repr(
            (CODENAME, BASE_PACKAGES, BOOTSTRAP_OPTIONS, BASE_HOOK, BASE_DOCKERFILE, sources, settings)
        ).encode()
    )
    for certificate in trusted:
        content.update(certificate.read_bytes())
    tag = content.hexdigest()[:16]
    packages.ensure(*packages.IMAGES)
    if not image_store.has("python", tag):
        say("building the base image that stands in for python:3.11-slim (about 40 s the first time)")
        with tempfile.TemporaryDirectory(prefix="base-", dir=builder_tmp()) as directory:
            context = Path(directory)
            _bootstrap(context, sources, settings, trusted)
            (context / "Dockerfile").write_text(BASE_DOCKERFILE)
            builder.build("python", tag, str(context / "Dockerfile"), context)
    return tag


def base_reference() -> str:
    """The base image: a Python to run scripts with."""
    return snapshots.reference("python", base())


def build(project_images: Sequence[Image]) -> dict[str, str]:
    """Build images of the project; return their references by variable.

    Those of one Dockerfile are built one after the other, so that the second finds the stages that both have: two builds
    at a time would make each of them twice, and everything that stands on them.
    """
    python = base()
    groups = groupby(project_images, key=lambda image: image.dockerfile)
    queues = [list(images) for _, images in groups]
    with ThreadPoolExecutor(len(queues)) as pool:
        tagged = pool.map(lambda queue: [(image, _build(image, python)) for image in queue], queues)
        built = [pair for pairs in tagged for pair in pairs]
    return {image.variable: snapshots.reference(image.name, tag) for image, tag in built}


def _build(image: Image, python: str) -> str:
    """Build an image on the base of that tag, unless there is one of the same content; return its tag."""
    dockerfile = REPOSITORY / image.dockerfile
    if not dockerfile.exists():
        raise ClusterError(f"there is no {image.dockerfile} to build {image.name} from")
    wheels = wheels_folder()
    tag = content_hash(REPOSITORY, image, wheels, python)
    if image_store.has(image.name, tag):
        say(f"{image.name}: nothing has changed")
    else:
        ensure_built(image, tag, f"localhost/python:{python}", wheels)
    return tag


def ensure_built(image: Image, tag: str, base: str, wheels: Path | None) -> None:
    """Build `localhost/<name>:<tag>` on a base image, unless buildah has it."""
    if image_store.has(image.name, tag):
        return
    began = time.monotonic()
    say(f"building {image.name} from {image.dockerfile}")
    options = ["--build-arg", f"BASE_IMAGE={base}"]
    options += ["--target", image.target] if image.target else []
    proxies = [f"{name}={value}" for name, value in machine.proxies().items()]
    for argument in (*image.arguments, *proxies, f"UV_CACHE={UV_CACHE}"):
        options += ["--build-arg", argument]
    for source, target, mode in _volumes(wheels):
        options += ["--volume", f"{source}:{target}:{mode}"]
    builder.build(image.name, tag, str(REPOSITORY / image.dockerfile), REPOSITORY, *options, aloud=True)
    say(f"{image.name}: built in {time.monotonic() - began:.0f} s")


def wheels_folder() -> Path | None:
    """A folder of wheels that builds may take packages from before they ask an index, if there is one."""
    configured = os.environ.get("WHEELS")
    folder = Path(configured) if configured else REPOSITORY.parent / "shared" / "wheels"
    return folder.resolve() if folder.is_dir() else None


def content_hash(context: Path, image: Image, wheels: Path | None, python: str) -> str:
    """What an image is made of, in sixteen letters: its Dockerfile, all that it copies, its base, the wheels."""
    text = (context / image.dockerfile).read_text()
    content = hashlib.sha256(f"{image.target}\0{python}\0{text}\0{' '.join(image.arguments)}".encode())
    for source in copied(text):
        for file in sorted(_files(context, source)):
            content.update(f"{file.relative_to(context)}\0{file.stat().st_mode & 0o111}\0".encode())
            content.update(hashlib.sha256(file.read_bytes()).digest())
    for wheel in sorted(wheels.iterdir()) if wheels else []:
        content.update(f"{wheel.name}\0{wheel.stat().st_size}\0".encode())
    return content.hexdigest()[:16]


def copied(dockerfile: str) -> list[str]:
    """The paths of the build context that a Dockerfile uses: of COPY, ADD and bind mounts."""
    paths: list[str] = []
    joined = re.sub(r"\\\n", " ", dockerfile)
    for line in joined.splitlines():
        words = line.split()
        if len(words) > 2 and words[0].upper() in {"COPY", "ADD"}:
            options = [word for word in words[1:] if word.startswith("--")]
            if not any(option.startswith("--from=") for option in options):
                paths += [word.strip('[]",') for word in words[1:] if not word.startswith("--")][:-1]
        for mount in re.findall(r"--mount=(\S+)", line):
            settings = dict(part.partition("=")[::2] for part in mount.split(","))
            if settings.get("type", "bind") == "bind" and "from" not in settings:
                paths.append(settings.get("source") or settings.get("src") or ".")
    return list(dict.fromkeys(paths))


def _files(context: Path, source: str) -> Iterable[Path]:
    matches = [context] if source in {".", "./", "/"} else list(context.glob(source.strip("/")))
    for match in matches:
        if match.is_file():
            yield match
        for folder, inner, files in os.walk(match):
            inner[:] = [name for name in inner if name not in SKIPPED and not name.endswith(".egg-info")]
            yield from (file for name in files if (file := Path(folder) / name).is_file())


def _volumes(wheels: Path | None) -> list[tuple[Path, str, str]]:
    """What a build sees of this machine: (source, target, mode)."""
    maven = cache() / "build" / "maven"
    packages_cache = machine.uv_cache(os.environ)
    for folder in (maven, packages_cache):
        folder.mkdir(parents=True, exist_ok=True)
    volumes = [(source, target, "ro") for source, target in machine.mounts(cache() / "build")]
    if wheels is not None:
        volumes.append((wheels, "/wheels", "ro"))
    return [*volumes, (maven, "/root/.m2/repository", "rw"), (packages_cache, UV_CACHE, "rw")]


def builder_tmp() -> Path:
    """A folder for what is built on the way to an image."""
    folder = builder.folder() / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _bootstrap(context: Path, sources: list[str], settings: str, trusted: list[Path]) -> None:
    """Make base.tar, a Debian with Python, in `context`."""
    (context / "apt.conf").write_text(settings)
    hook = context / "hook"
    hook.write_text("#!/bin/sh\n" + BASE_HOOK)
    hook.chmod(0o755)
    argv = [
        "mmdebstrap",
        "--mode=root",
        *BOOTSTRAP_OPTIONS,
        f"--include={','.join(BASE_PACKAGES)}",
    ]
    argv += [f"--aptopt={context / 'apt.conf'}"] if settings else []
    if trusted:
        authorities = context / "ca-certificates"
        authorities.mkdir()
        for certificate in trusted:
            shutil.copyfile(certificate, authorities / certificate.name)
        argv.append(f"--customize-hook=copy-in {authorities} /usr/local/share")
    argv += [f"--customize-hook={hook}", CODENAME, str(context / "base.tar"), *sources]
    environment = {**os.environ, "PATH": packages.SEARCHED}
    done = subprocess.run([*ASIDE, *argv], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"mmdebstrap failed ({done.returncode}):\n{done.stderr.strip()[-3000:]}")
