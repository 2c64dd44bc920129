"""An index of promotions by model, by endpoint, and by the job of their source, so that a pass need not search all promotions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from finetune_crds.base import Json

Key = tuple[str, str]  # namespace, name
# What promotions are looked up by: ("model", name), ("endpoint", name), or ("job", namespace, name).
_Term = tuple[str, ...]


@dataclass
class PromotionIndex:
    """The keys of promotions, by their model, by the endpoint that they change, and by the FineTuneJob of their source.

    NB: a spec may not fit the schema of this version of the operator, so specs are read as JSON.
    """

    _by_term: dict[_Term, set[Key]] = field(default_factory=lambda: defaultdict(set))

    def add(self, key: Key, body: Json) -> None:
        """Add a promotion."""
        for term in _list_terms(body):
            self._by_term[term].add(key)

    def remove(self, key: Key, body: Json) -> None:
        """Remove a promotion, given as it was added."""
        for term in _list_terms(body):
            keys = self._by_term[term]
            keys.discard(key)
            if not keys:
                del self._by_term[term]

    def of_model(self, model: str) -> list[Key]:
        """The promotions of a registered model, in whatever case they write its name, since Unity Catalog ignores the case."""
        return self._sorted(("model", model.casefold()))

    def of_endpoint(self, endpoint: str) -> list[Key]:
        """The promotions that change a serving endpoint of this name, on any server."""
        return self._sorted(("endpoint", endpoint))

    def of_job(self, namespace: str, name: str) -> list[Key]:
        """The promotions that take their version from a FineTuneJob."""
        return self._sorted(("job", namespace, name))

    def _sorted(self, term: _Term) -> list[Key]:
        return sorted(self._by_term.get(term, ()))


def find_endpoint(serving: Json) -> str | None:
    """The name of the endpoint that a promotion changes.

    In an earlier schema, the name was in `serving.databricks`. A promotion of that schema still claims its endpoint before younger
    promotions.
    """
    return serving.get("endpoint") or (serving.get("databricks") or {}).get("endpoint")


def _list_terms(body: Json) -> Iterator[_Term]:
    meta, spec = body["metadata"], body.get("spec") or {}
    yield "model", str(spec.get("model")).casefold()
    endpoint = find_endpoint(spec.get("serving") or {})
    if endpoint:
        yield "endpoint", str(endpoint)
    job = ((spec.get("source") or {}).get("fineTuneJobRef") or {}).get("name")
    if job:
        yield "job", meta["namespace"], str(job)
