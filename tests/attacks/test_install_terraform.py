"""An attacker on the way, or on HashiCorp's server, answers scripts/install-terraform with another program.

Nothing is installed unless the checksums are signed with the one key and the archive has the one checksum.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[2]
VERSION = "1.11.4"
NAME = f"terraform_{VERSION}_linux_amd64.zip"
SUMS = f"terraform_{VERSION}_SHA256SUMS"
HASHICORP = "C874011F0AB405110D02105534365D9472D7468F"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def gpg(home: Path, *arguments: str) -> str:
    options = ["--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
    return subprocess.run(
        ["gpg", *options, *arguments],
        capture_output=True, text=True, check=True, timeout=BOUND_SECONDS,
    ).stdout  # fmt: skip


def end_agents(home: Path) -> None:
    """Ends what gpg leaves running for a keyring."""
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True, timeout=BOUND_SECONDS)


def make_key(home: Path) -> str:
    """Makes a key in a keyring of its own, and returns its fingerprint."""
    home.mkdir(mode=0o700)
    gpg(home, "--quick-generate-key", "Releases <r@example>", "ed25519", "sign", "never")
    [line, *_] = [line for line in gpg(home, "--with-colons", "--list-keys").splitlines() if line.startswith("fpr")]
    return line.split(":")[9]


@dataclass
class Releases:
    """A server of releases, and a copy of the script that knows its key and checksum."""

    root: Path
    served: Path
    keyring: Path
    script: Path

    def sign(self, keyring: Path | None = None) -> None:
        signature = self.served / f"{SUMS}.sig"
        signature.unlink(missing_ok=True)
        gpg(keyring or self.keyring, "--detach-sign", "--output", str(signature), str(self.served / SUMS))

    def install(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.script)], env={"PATH": "/usr/bin:/bin", "HOME": str(self.root / "home")},
            capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
        )  # fmt: skip

    @property
    def installed(self) -> list[Path]:
        return [path for path in (self.root / "bin", self.root / "home") if path.exists() for path in path.rglob("*")]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, str]]]:
    """The releases' key and a stranger's: keyrings and fingerprints. Short paths, for gpg's socket."""
    root = tmp_path_factory.mktemp("k")
    try:
        yield {name: (root / name, make_key(root / name)) for name in ("own", "other")}
    finally:
        for home in root.iterdir():
            end_agents(home)


@pytest.fixture
def releases(tmp_path: Path, keys: dict[str, tuple[Path, str]]) -> Iterator[Releases]:
    served = tmp_path / "served"
    served.mkdir()
    with zipfile.ZipFile(served / NAME, "w") as archive:
        archive.writestr("terraform", "#!/bin/sh\necho genuine\n")
    checksum = hashlib.sha256((served / NAME).read_bytes()).hexdigest()
    (served / SUMS).write_text(f"{'0' * 64}  terraform_{VERSION}_linux_386.zip\n{checksum}  {NAME}\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(served)))
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    keyring, fingerprint = keys["own"]
    (tmp_path / "scripts").mkdir()
    text = (ROOT / "scripts" / "install-terraform").read_text()
    own = {
        "checksum=1ce994251c00281d6845f0f268637ba50c0005657eb3cf096b92f753b42ef4dc": f"checksum={checksum}",
        f"fingerprint={HASHICORP}": f"fingerprint={fingerprint}",
        "base=https://releases.hashicorp.com/terraform/$version": f"base=http://127.0.0.1:{server.server_port}",
        "/usr/local/bin": str(tmp_path / "bin"),
        "--retry 3": "",
    }
    for old, new in own.items():
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "scripts" / "install-terraform"
    script.write_text(text)
    (tmp_path / "scripts" / "hashicorp.asc").write_text(gpg(keyring, "--armor", "--export", fingerprint))
    releases = Releases(tmp_path, served, keyring, script)
    releases.sign()
    yield releases
    server.shutdown()
    server.server_close()
    serving.join()


def test_what_is_signed_and_has_its_checksum_is_installed(releases: Releases) -> None:
    done = releases.install()
    assert done.returncode == 0, done.stderr
    [program] = [path for path in releases.installed if path.is_file()]
    assert program.name == "terraform"
    assert subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout == "genuine\n"


def swapped_archive(releases: Releases, _: Path) -> None:
    with zipfile.ZipFile(releases.served / NAME, "w") as archive:
        archive.writestr("terraform", "#!/bin/sh\necho evil\n")


def truncated_archive(releases: Releases, _: Path) -> None:
    path = releases.served / NAME
    path.write_bytes(path.read_bytes()[:-10])


def changed_sums(releases: Releases, other: Path) -> None:
    swapped_archive(releases, other)
    checksum = hashlib.sha256((releases.served / NAME).read_bytes()).hexdigest()
    (releases.served / SUMS).write_text(f"{checksum}  {NAME}\n")


def changed_sums_signed_with_the_key(releases: Releases, other: Path) -> None:
    """The signing key was stolen: the checksum in the script still holds."""
    changed_sums(releases, other)
    releases.sign()


def signed_by_another_key(releases: Releases, other: Path) -> None:
    releases.sign(other)


def signed_by_another_key_in_the_key_file(releases: Releases, other: Path) -> None:
    """A key file was swapped in the checkout, but not the fingerprint."""
    releases.sign(other)
    (releases.script.parent / "hashicorp.asc").write_text(gpg(other, "--armor", "--export"))


def without_signature(releases: Releases, _: Path) -> None:
    (releases.served / f"{SUMS}.sig").unlink()


def empty_signature(releases: Releases, _: Path) -> None:
    (releases.served / f"{SUMS}.sig").write_bytes(b"")


def without_key(releases: Releases, _: Path) -> None:
    (releases.script.parent / "hashicorp.asc").write_text("")


ATTACKS = {
    "archive": swapped_archive, "truncated": truncated_archive, "sums": changed_sums,
    "stolen": changed_sums_signed_with_the_key, "stranger": signed_by_another_key,
    "swapped-key": signed_by_another_key_in_the_key_file, "unsigned": without_signature,
    "empty": empty_signature, "keyless": without_key,
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_anything_else_is_refused_and_nothing_is_installed(
    releases: Releases, keys: dict[str, tuple[Path, str]], attack: object
) -> None:
    assert callable(attack)
    attack(releases, keys["other"][0])
    done = releases.install()
    assert done.returncode == 1
    assert "nothing was installed" in done.stderr
    assert [path for path in releases.installed if path.is_file()] == []


def test_the_shipped_key_is_hashicorps(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    listed = gpg(tmp_path, "--with-colons", "--show-keys", str(ROOT / "scripts" / "hashicorp.asc"))
    end_agents(tmp_path)
    fingerprints = [line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr")]
    assert fingerprints[0] == HASHICORP
    assert sum(line.startswith("pub") for line in listed.splitlines()) == 1
