"""The file system of abfss://, which uses only the login that it is given."""

from __future__ import annotations

from typing import Any

from adlfs import AzureBlobFileSystem

# The options of adlfs that make up a login.
_LOGIN = ("account_name", "account_key", "connection_string", "sas_token")


class AccountFiles(AzureBlobFileSystem):
    """Files of one account of Azure.

    NB: adlfs takes missing options from the environment, and prefers a connection string to any other login: with the connection
    string of another account, it would read and write in that account.

    Args:
        options: options of adlfs, including a login.
    """

    def __init__(self, **options: Any) -> None:
        self._login = {name: options.get(name) for name in _LOGIN}
        super().__init__(**options)

    def do_connect(self) -> None:
        """Connect with the given login only."""
        # By now, adlfs has filled missing options from the environment.
        self.__dict__.update(self._login)
        super().do_connect()
