"""Who moves an alias: this installation of the operator, another one, or nobody yet."""

from __future__ import annotations

from typing import Literal, NamedTuple

LEASE_SECONDS = 45 * 60.0
"""How long an installation owns an alias whose tag it does not renew."""
# Longer than another installation usually takes from reading that nobody owns an alias to writing its tag. NB: if it takes longer, the
# installation that was first finds the other tag before its next write, and gives way.
SETTLE_SECONDS = 2.0

OwnershipState = Literal["Unsupported", "Unclaimed", "Settling", "Ours", "Due", "Foreign"]
"""Who owns an alias.

- Unsupported: owners cannot be recorded in this registry.
- Unclaimed: nobody, or an owner that has not renewed its tag in time.
- Settling: this installation has just taken the alias, and does not know yet whether another one did too.
- Ours: this installation.
- Due: this installation, and the tag must be renewed.
- Foreign: another installation.
"""


class Ownership(NamedTuple):
    """Who owns an alias; `owner` describes another installation."""

    state: OwnershipState
    owner: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether the alias must not be moved yet."""
        return self.state in ("Unclaimed", "Settling")


UNSUPPORTED = Ownership("Unsupported")
