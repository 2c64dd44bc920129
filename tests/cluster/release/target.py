"""Where a release goes, and what it is called there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from cluster.paths import ClusterError

_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z][0-9A-Za-z.-]*)?")
# A host has a dot or a port, or is localhost: anything else is a folder of Docker Hub to Docker, and no host to Helm.
_REGISTRY = re.compile(
    r"(localhost|(?=[^/]*[.:])[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d+)?)(/[a-z0-9][a-z0-9._-]*)*"
)


@dataclass(frozen=True)
class Target:
    """A registry and a version.

    Attributes:
        registry: host of the registry, with the folder in it if there is one.
        version: version of the chart, and tag of the images.
        tls: whether the registry is reached by https.
    """

    registry: str
    version: str
    tls: bool = True

    @classmethod
    def of(cls, registry: str, version: str) -> Self:
        """The target that the command line names; `http://` before the registry means no TLS.

        Raises:
            ClusterError: one of them is missing, or cannot be one.
        """
        without_scheme = registry.removeprefix("http://")
        if not _REGISTRY.fullmatch(without_scheme):
            raise ClusterError(
                f"REGISTRY={registry} is no registry: name it as registry.example.com, registry.example.com/folder or, "
                "for Docker Hub, docker.io/folder"
            )
        if not _VERSION.fullmatch(version):
            raise ClusterError(f"VERSION={version} is no version: name it as 0.2.0 or 0.2.0-rc.1")
        return cls(without_scheme, version, tls=without_scheme == registry)

    def image(self, name: str, variant: str = "") -> str:
        """The reference of an image; a variant such as cu130 is part of its tag."""
        return f"{self.registry}/{name}:{self.version}" + (f"-{variant}" if variant else "")

    @property
    def charts(self) -> str:
        """The folder of charts. NB: an image of the operator has the chart's name, so charts have a folder of their own."""
        return f"oci://{self.registry}/charts"
