"""Digests of the requirements on a version. The status records them, so that a later pass notices a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from finetune_crds.gates import Gate
from finetune_crds.modelpromotion import ModelPromotionSpec


def gates_digest(gates: Sequence[Gate]) -> str:
    """Digest of the gates."""
    return digest([gate.to_json() for gate in gates])


def terms_digest(spec: ModelPromotionSpec) -> str:
    """Digest of all requirements on a version: the gates and the serving endpoint. When the alias moves is no requirement."""
    serving = spec.serving.to_json() if spec.serving else None
    if serving:
        serving.pop("aliasMoves", None)
    return digest([[gate.to_json() for gate in spec.gates], serving])


def digest(content: object) -> str:
    """Digest of content that can be written as JSON, in 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
