"""The tokens at which the files of a model make transformers and model servers stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

GENERATION_CONFIG = "generation_config.json"


def read_stop_tokens(
    base: Path, adapter: Path | None = None, *, trust_remote_code: bool = False
) -> list[int]:
    """Return the ids of the stop tokens in the generation config of a model, or in its configuration if it has no generation config.

    Args:
        base: folder of the model.
        adapter: folder of an adapter on the model; its generation config, if it has one, replaces the model's.
        trust_remote_code: whether the configuration may be the model's own code.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    folders = (folder for folder in (adapter, base) if folder and (folder / GENERATION_CONFIG).exists())
    folder = next(folders, None)
    # NB: as in transformers, the configuration has no effect if there is a generation config, even one without stop tokens.
    config: Any = (
        GenerationConfig.from_pretrained(str(folder))
        if folder
        else GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(str(base), trust_remote_code=trust_remote_code)
        )
    )
    tokens = config.eos_token_id
    if tokens is None:
        return []
    return [int(token) for token in tokens] if isinstance(tokens, list) else [int(tokens)]
