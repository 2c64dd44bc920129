"""What builds and pushes the images of a release: docker or, where no engine answers, buildah."""

from __future__ import annotations

import json
import platform as platforms
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cluster import backends, builder, images, kind, packages
from cluster.binaries import say
from cluster.paths import REPOSITORY, ClusterError
from cluster.process import run

if TYPE_CHECKING:
    from cluster.images import Image

STAND_IN = "stand-in"
"""The base image that stands in for python:3.11-slim on machines that reach no registry; see `images.base`."""
_BUILD_SECONDS = 3600
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def _familiar(repository: str) -> str:
    """A repository as `docker inspect` names it: without the host of Docker Hub."""
    return repository.removeprefix("docker.io/")


class Engine(Protocol):
    """A program that builds and pushes images."""

    def publish(self, image: Image, reference: str, *, tls: bool) -> str:
        """Build an image and push it; return its digest in the registry."""


@dataclass(frozen=True)
class Docker:
    """A Docker engine. NB: which registries it reaches without TLS is its own setting."""

    base: str
    platform: str

    def publish(self, image: Image, reference: str, *, tls: bool) -> str:
        """Build an image and push it; return its digest in the registry."""
        argv = ["docker", "build", "--platform", self.platform]
        argv += ["--file", image.dockerfile, "--tag", reference]
        argv += ["--target", image.target] if image.target else []
        for argument in (f"BASE_IMAGE={self.base}", *image.arguments):
            argv += ["--build-arg", argument]
        say(f"building {reference}")
        run(*argv, str(REPOSITORY), timeout=_BUILD_SECONDS)
        say(f"pushing {reference}")
        run("docker", "push", reference, timeout=_BUILD_SECONDS)
        repo_digests = json.loads(run("docker", "inspect", "--format", "{{json .RepoDigests}}", reference))
        repository = _familiar(reference.rpartition(":")[0])
        for name, _, digest in (str(each).partition("@") for each in repo_digests):
            if _familiar(name) == repository:
                return digest
        raise ClusterError(f"docker does not say the digest of {reference}, but knows {repo_digests}")


@dataclass(frozen=True)
class Buildah:
    """buildah, with the store of the local cluster: what that has built is not built again."""

    base: str

    def publish(self, image: Image, reference: str, *, tls: bool) -> str:
        """Build an image and push it; return its digest in the registry."""
        name, content = self._base()
        # A folder of wheels has one build of torch: that for CPUs.
        wheels = None if image.arguments else images.wheels_folder()
        tag = images.content_hash(REPOSITORY, image, wheels, content)
        images.ensure_built(image, tag, name, wheels)
        say(f"pushing {reference}")
        return builder.copy(image.name, tag, reference, tls=tls)

    def _base(self) -> tuple[str, str]:
        """The name of the base image in buildah's store, and what tells its content."""
        if self.base == STAND_IN:
            tag = images.base()
            return f"localhost/python:{tag}", tag
        builder.pull(self.base)
        return self.base, builder.buildah("images", "--quiet", "--no-trunc", self.base)


def choose(base: str, platform: str) -> Engine:
    """The engine of this machine, for a platform such as linux/amd64.

    Raises:
        ClusterError: there is none, or it cannot build on that base or for that platform.
    """
    if base == STAND_IN and not backends.can_be_local():
        raise ClusterError(f"BASE_IMAGE={STAND_IN} needs root on Debian or Ubuntu")
    if base != STAND_IN and kind.has_docker():
        return Docker(base, platform)
    if backends.can_be_local():
        if platform != here():
            raise ClusterError(
                f"buildah builds for {here()} here: name PLATFORM={here()}, or use a Docker engine"
            )
        packages.ensure(*packages.IMAGES)
        return Buildah(base)
    raise ClusterError(
        "a release needs a Docker engine that answers, or root on Debian or Ubuntu for buildah"
    )


def here() -> str:
    """The platform of this machine."""
    machine = platforms.machine()
    return f"linux/{_ARCHITECTURES.get(machine, machine)}"


def for_cuda(backend: str) -> Image:
    """The trainer's image with torch for a version of CUDA, such as cu130."""
    trainer = next(image for image in images.PROJECT if image.target == "trainer")
    return replace(trainer, variable="IMAGE_TRAINER_CUDA", arguments=(f"TORCH_BACKEND={backend}",))
