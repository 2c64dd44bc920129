"""The file system of abfss://, with the login that it is given and no other."""

from __future__ import annotations

from typing import Any

from adlfs import AzureBlobFileSystem

_LOGIN = ("account_name", "account_key", "connection_string", "sas_token")


class AccountFiles(AzureBlobFileSystem):
    """Files of one account of Azure.

    NB: adlfs takes from the environment what it is not given, and prefers a connection string to all else: with that of another
    account it would read and write there.

    Args:
        options: those of adlfs, with a login.
    """

    def __init__(self, **options: Any) -> None:
        self._login = {name: options.get(name) for name in _LOGIN}
        super().__init__(**options)

    def do_connect(self) -> None:
        """Connect with what was given alone."""
        self.__dict__.update(self._login)
        super().do_connect()
