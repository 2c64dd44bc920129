"""References to secrets of a Databricks workspace: {{secrets/scope/key}}. The workspace reads the secret as the identity that logs in.

https://docs.databricks.com/aws/en/security/secrets/secrets-spark-conf-env-var
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from finetune_crds.env import LocalReference

# The text of the scope ends at the next slash, or with the reference.
_REFERENCE = re.compile(r"\{\{\s*secrets/([^/}]*)")


def is_own_login(reference: LocalReference | None) -> bool:
    """Whether a spec's secretRef ensures a login of the namespace. NB: if an optional Secret is missing, the chart's login is used."""
    return reference is not None and not reference.optional


def is_reference(value: str) -> bool:
    """Whether a value contains a reference to a secret of a workspace."""
    return _REFERENCE.search(value) is not None


def find_scopes(value: str) -> set[str]:
    """Return the scopes of the references in a value."""
    return {scope.strip() for scope in _REFERENCE.findall(value)}


def find_unreadable(variables: Mapping[str, str], field: str, login: str) -> Iterator[str]:
    """Yield a message about variables that refer to secrets which the chart's service principal would read.

    Args:
        variables: the values by name.
        field: the field of the spec with the variables.
        login: the field of the spec for a login of the namespace.
    """
    names = [name for name, value in variables.items() if is_reference(value)]
    if names:
        yield (
            f"{field} refers to a secret of the workspace in {', '.join(names)}, and the chart's service principal would read the secret "
            f"instead of you: set {login} to a Secret with your own Databricks credentials"
        )
