"""References to secrets of a Databricks workspace ({{secrets/scope/key}}), which the workspace reads as whoever logs in.

https://docs.databricks.com/aws/en/security/secrets/secrets-spark-conf-env-var
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from finetune_crds.env import LocalReference

_REFERENCE = re.compile(r"\{\{\s*secrets/")


def is_own_login(reference: LocalReference | None) -> bool:
    """Whether the login is one of the namespace. NB: where an optional Secret is missing, it is that of the installation."""
    return reference is not None and not reference.optional


def is_reference(value: str) -> bool:
    """Whether a value names a secret of a workspace."""
    return _REFERENCE.search(value) is not None


def find_unreadable(variables: Mapping[str, str], field: str, login: str) -> Iterator[str]:
    """Values that name secrets which the service principal of the installation would read.

    Args:
        variables: by name.
        field: that holds them.
        login: the field that names a login of the namespace.
    """
    names = [name for name, value in variables.items() if is_reference(value)]
    if names:
        yield (
            f"{field} sets {', '.join(names)} to a secret of the workspace, which would be read as the installation's service principal: "
            f"set {login} to a Secret with your own credentials"
        )
