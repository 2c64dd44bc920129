"""Manifests in the documentation: whole ones, and parts of a spec that are completed from a sample."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from finetune_crds import GROUP
from finetune_crds.resources import RESOURCES, Resource
from finetune_crds.schema import crd
from support.documents import ROOT, Block

Json = dict[str, Any]

KINDS: dict[str, Resource] = {kind.KIND: kind for kind in RESOURCES}
SCHEMAS: dict[str, Json] = {
    name: crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name, kind in KINDS.items()
}
VALUES = "Values"
"""The title of a block with values of the chart."""
# What a part of a spec is put into.
BASES = {"FineTuneJob": "quickstart", "ModelPromotion": "promotion-champion", "FineTuneSchedule": "schedule"}
_TITLE = re.compile(rf"(?P<kind>{'|'.join(KINDS)}) (?P<path>spec(?:\.\w+)*)")


class DocumentError(ValueError):
    """A block of YAML is neither a manifest nor says which part of which kind it is."""


def parse(text: str) -> list[Json]:
    """The documents of a YAML text, without empty ones. libyaml reads them, in a tenth of the time that Python needs."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


@cache
def base(kind: str) -> Json:
    """A sample of a kind. NB: not to be changed."""
    (sample,) = parse((ROOT / "crds" / "samples" / f"{BASES[kind]}.yaml").read_text(encoding="utf-8"))
    return sample


def resources(block: Block) -> Iterator[Json]:
    """The resources of a block of YAML; a part of one is completed.

    The block's title says which part it is, such as `FineTuneJob spec.data`; one called Values is the chart's.

    Raises:
        DocumentError: it is empty, or no manifest, and its title names no part.
    """
    documents = parse(block.text)
    if not documents:
        raise DocumentError(f"{block} has no document")
    for part in documents if block.title != VALUES else ():
        is_manifest = isinstance(part, dict) and {"apiVersion", "kind", "metadata"} <= part.keys()
        if is_manifest and part["apiVersion"].startswith(f"{GROUP}/"):
            yield part
        elif not is_manifest:
            yield completed(part, block)


def completed(part: Json, block: Block) -> Json:
    """A sample with a part of its spec replaced; what the part needs and lacks is the sample's."""
    title = _TITLE.fullmatch(block.title)
    if title is None:
        raise DocumentError(
            f'{block}: give it a title such as "FineTuneJob spec.data", or apiVersion, kind and metadata'
        )
    kind, path = title["kind"], title["path"].split(".")
    manifest = copy.deepcopy(base(kind))
    schema, parent = SCHEMAS[kind], manifest
    for name in path[:-1]:
        schema, parent = schema["properties"][name], parent.setdefault(name, {})
    last = path[-1]
    needed = {*schema["properties"][last].get("required", []), *_needed_by_rules(block.title, part)}
    sample = parent.get(last, {})
    parent[last] = {name: sample[name] for name in needed - part.keys() if name in sample} | part
    return manifest


def _needed_by_rules(title: str, part: Json) -> set[str]:
    """The fields that no schema requires, and the rules of the resource do."""
    if title == "FineTuneJob spec":
        return set() if "command" in part.get("trainer", {}) else {"model", "data"}
    if title == "FineTuneJob spec.data":
        return set() if "splits" in part else {"source"}
    return set()
