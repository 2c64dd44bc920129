"""The address of a workspace, as people write it."""

from __future__ import annotations

import pytest

from finetune_operator.databricks.access import find_workspace
from finetune_operator.errors import ExternalError
from finetune_operator.settings import Settings

ADDRESS = "https://adb-1.azuredatabricks.net"
ADDRESSES: dict[str, str | None] = {
    ADDRESS: ADDRESS,
    f"{ADDRESS}/": ADDRESS,
    "adb-1.azuredatabricks.net": ADDRESS,
    "https://ADB-1.azuredatabricks.net:443": ADDRESS,
    "http://127.0.0.1:8080": "http://127.0.0.1:8080",
    f"{ADDRESS}/?o=1#workspace": None,
    f"{ADDRESS}?o=1": None,
    f"{ADDRESS}/ml/experiments": None,
    "https://me:secret@w": None,
    "ftp://w": None,
}


@pytest.mark.parametrize(("host", "expected"), ADDRESSES.items())
def test_equal_workspaces_have_one_address_and_nothing_of_an_address_is_ignored(
    host: str, expected: str | None
) -> None:
    """Pods get the address of a Secret as it is: what only the operator left out would make their requests fail."""
    secret = {"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": "t"}
    if expected:
        assert find_workspace(Settings(), secret) == expected
        return
    with pytest.raises(
        ExternalError, match=r"^DATABRICKS_HOST is not a workspace address: .*, without a path or a query$"
    ):
        find_workspace(Settings(), secret)
