"""Asks the sampler of sweeps for values, in a process that ends with its answer."""

from __future__ import annotations

import asyncio
import json
import sys

from finetune_crds.base import Json

_TIMEOUT_SECONDS = 60.0
_MODULE = "finetune_operator.finetunejob.sweep.sampler"
# One process at a time: each takes 40 MiB.
_lock = asyncio.Lock()


class SuggestionError(Exception):
    """The sampler failed."""


async def suggest_values(request: Json) -> dict[str, Json]:
    """The values of trials, by number and field.

    Args:
        request: the document that `sampler` reads.

    Raises:
        SuggestionError: the sampler failed, or took too long.
    """
    async with _lock:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                answer, errors = await process.communicate(json.dumps(request).encode())
        except TimeoutError as error:
            raise SuggestionError(f"no values of trials within {_TIMEOUT_SECONDS:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
    if process.returncode:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise SuggestionError(f"Optuna failed to suggest values of trials: {last_line}")
    suggestions: dict[str, Json] = json.loads(answer)
    return suggestions
