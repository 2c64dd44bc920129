"""Digests: what a version was judged by, in one short word."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from finetune_crds.gates import Gate
from finetune_crds.modelpromotion import ModelPromotionSpec


def gates_digest(gates: Sequence[Gate]) -> str:
    """The same for the same gates, and for them alone."""
    return digest([gate.to_json() for gate in gates])


def terms_digest(spec: ModelPromotionSpec) -> str:
    """The same for all that a version has to stand: the gates and the serving endpoint."""
    serving = spec.serving.to_json() if spec.serving else None
    return digest([[gate.to_json() for gate in spec.gates], serving])


def digest(content: object) -> str:
    """A short name for what JSON can hold: the same for the same content, and for that alone."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
