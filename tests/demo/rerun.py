"""What `make demo` keeps of a demo that ran before: an unfinished one continues, a finished one starts again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from demo import promotions
from demo.install import NAMESPACE, SAMPLES, Installation

if TYPE_CHECKING:
    from demo.kubectl import Json

QUICKSTART = SAMPLES / "quickstart.yaml"
WORSE = SAMPLES / "quickstart-worse.yaml"
Start = Literal["beginning", "first job", "second job"]


def clean_up(installation: Installation) -> bool:
    """Delete what an earlier demo left, unless this one continues with it.

    Returns:
        Whether the earlier demo stopped at its second job or later, so that its first half is not repeated.
    """
    kubectl, terminal = installation.place.kubectl, installation.terminal
    first, second = (
        kubectl.get("finetunejob", manifest.stem, "--namespace", NAMESPACE)
        for manifest in (QUICKSTART, WORSE)
    )
    champion = kubectl.get("modelpromotion", "champion", "--namespace", NAMESPACE)
    start = find_start(first, second, champion)
    if start == "second job":
        terminal.detail(f"an earlier demo stopped after {QUICKSTART.stem}: continuing with {WORSE.stem}")
        return True
    # NB: in this order, so that a run that is interrupted here leaves nothing that the next one takes for an unfinished demo.
    if start == "beginning":
        terminal.detail(f"{QUICKSTART.stem} of an earlier demo is there: deleting it, to run it again")
        installation.delete("finetunejob", QUICKSTART.stem)
    if second is not None:
        terminal.detail(f"{WORSE.stem} of an earlier demo is there: deleting it")
        installation.delete("finetunejob", WORSE.stem)
    promotions.forget(installation)
    return False


def find_start(first: Json | None, second: Json | None, champion: Json | None) -> Start:
    """Where the demo starts. At the beginning, the first job is deleted and run again; else it stays, unless it has failed."""
    if read_phase(first) != "Succeeded":
        return "first job"
    if is_rolled_back(champion):
        return "beginning"
    if second is None:
        return "first job"
    # Without the promotions, the alias candidate is at the version of either job.
    return "second job" if champion else "beginning"


def is_rolled_back(champion: Json | None) -> bool:
    """Whether the last stage of the demo has begun."""
    return champion is not None and champion["spec"].get("rollbackTo") is not None


def read_phase(job: Json | None) -> str | None:
    """The phase of a job; None when it does not exist or has none yet."""
    phase: str | None = (job or {}).get("status", {}).get("phase")
    return phase
