"""A Postgres server of the tests' own: Debian's postgresql, in a temporary directory, on a port of the loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.ports import reserved_port

USER = "postgres"


@contextmanager
def serving() -> Iterator[str]:
    """The URL of an empty database; the server and its files go at the end."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    assert programs, "Debian's package postgresql is missing: scripts/setup dev installs it"
    with tempfile.TemporaryDirectory(prefix="pg-") as name, reserved_port() as port:
        directory = Path(name)
        as_user: list[str] = []
        if os.geteuid() == 0:  # which Postgres does not run as
            account = pwd.getpwnam(USER)
            shutil.chown(directory, account.pw_uid, account.pw_gid)
            as_user = ["runuser", "-u", USER, "--"]

        def run(program: str, *arguments: str) -> None:
            subprocess.run(
                [*as_user, str(programs[-1] / program), *arguments], check=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory,
            )  # fmt: skip

        data = str(directory / "data")
        run("initdb", "-D", data, "-A", "trust", "-U", USER, "--no-sync")
        options = f"-k {directory} -p {port} -c listen_addresses=127.0.0.1 -c fsync=off"
        run("pg_ctl", "-D", data, "-w", "-o", options, "start")
        try:
            with psycopg.connect(f"postgresql://{USER}@127.0.0.1:{port}/{USER}", autocommit=True) as connection:
                connection.execute("CREATE DATABASE provisioner")
            yield f"postgresql://{USER}@127.0.0.1:{port}/provisioner"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
