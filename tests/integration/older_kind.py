"""A copy of a CustomResourceDefinition whose objects are older than its rules. Other tests use the one that there is meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kubernetes.dynamic.exceptions import DynamicApiError, ResourceNotFoundError

from fixtures.operator_processes.servers import CRDS
from support.api import Api
from support.manifests import parse

Json = dict[str, Any]


@dataclass(frozen=True)
class OlderKind:
    """A kind of the test's own.

    Attributes:
        kind: such as OlderJob.
        file: the manifest of the definition that it copies.
    """

    kind: str
    file: str

    @property
    def definition(self) -> Json:
        """The definition with all rules."""
        (crd,) = parse((CRDS / self.file).read_text(encoding="utf-8"))
        singular = self.kind.lower()
        crd["metadata"]["name"] = f"{singular}s.finetune.dev"
        crd["spec"]["names"] = {
            "kind": self.kind,
            "plural": f"{singular}s",
            "singular": singular,
            "listKind": f"{self.kind}List",
        }
        return dict(crd)

    def create(self, api: Api, without_rules: Callable[[Any], Any]) -> None:
        """Create the definition as it was before the rules."""
        before = copy.deepcopy(self.definition)
        before["spec"]["versions"] = without_rules(before["spec"]["versions"])
        api.create(before)

    def add_rules(self, api: Api) -> None:
        """Give the definition its rules, as an upgrade does."""
        crd = self.definition
        versions = {"spec": {"versions": crd["spec"]["versions"]}}
        api.patch("CustomResourceDefinition", "", crd["metadata"]["name"], versions)


def is_taken(api: Api, body: Json, *, dry_run: bool = False) -> bool:
    """Whether the API server takes an object."""
    try:
        api.create(body, dry_run=dry_run)
    except (DynamicApiError, ResourceNotFoundError):
        return False
    return True
