"""A PostgreSQL server for one test, on a socket in a folder that is removed with it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import packages
from support.process import Process, as_user
from support.waiting import wait_for


@contextmanager
def postgres() -> Iterator[str]:
    """The address of an empty database, as SQLAlchemy takes it."""
    packages.ensure(postgres=True)
    programs = packages.postgres_folder()
    assert programs is not None
    user = _unprivileged()
    # NB: not below pytest's folder, which other users cannot enter; and a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="finetune-pg-"))
    try:
        if user:
            shutil.chown(folder, user)
        command = [str(programs / "initdb"), "--pgdata", str(folder / "data"), "--username", "mlflow"]
        command += ["--auth", "trust", "--no-sync", "--locale", "C.UTF-8", "--encoding", "UTF8"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, **as_user(user))
        start = [str(programs / "postgres"), "-D", str(folder / "data"), "-k", str(folder), "-h", "", "-F"]
        server = Process("postgres", start, folder / "log", user=user, stop_signal=signal.SIGINT)
        server.start()
        try:
            wait_for("PostgreSQL accepts connections", lambda: _ready(programs, folder), 60, server)
            # NB: a plain postgresql:// means another driver to newer versions of SQLAlchemy.
            yield f"postgresql+psycopg2://mlflow@/postgres?host={folder}"
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _unprivileged() -> str | None:
    """A user other than root, which PostgreSQL refuses; None if this process does not run as root."""
    if os.geteuid() != 0:
        return None
    return next(name for name in ("postgres", "nobody") if name in {user.pw_name for user in pwd.getpwall()})


def _ready(programs: Path, folder: Path) -> bool:
    command = [str(programs / "pg_isready"), "--host", str(folder), "--quiet"]
    return subprocess.run(command, check=False).returncode == 0
