"""References of images, in the parts that the chart's values have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Reference:
    """registry/repository:tag or registry/repository@digest; what is absent is empty."""

    registry: str
    repository: str
    tag: str
    digest: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Take a reference apart, as a container runtime does: without tag and digest it means the tag latest."""
        name, _, digest = text.partition("@")
        host, slash, path = name.partition("/")
        # A host has a dot or a port, or is localhost; anything else is a folder of the default registry.
        if slash and ("." in host or ":" in host or host == "localhost"):
            registry = host
        else:
            registry, path = "", name
        repository, _, tag = path.partition(":")
        return cls(registry, repository, tag if tag or digest else "latest", digest)

    def values(self, path: str) -> list[str]:
        """The chart's values for the image at a path such as image.trainer, `name=value` each, all of them strings."""
        return [f"{path}.{name}={value}" for name, value in vars(self).items()]
