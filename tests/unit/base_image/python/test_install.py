"""Tests what becomes of Debian's files in the Python of families. tests/local/test_python.py shows that it works."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from provisioner.base_image.python import install

SYSCONFIG = """
    'deb_system': {
        'purelib': '{base}/lib/python3/dist-packages',
        },
    'posix_home': {
        'purelib': '{base}/lib/python',
        },
    for scheme in ('posix_prefix', 'posix_home', 'posix_local', 'deb_system'):
    if sys.base_prefix != sys.prefix or hasattr(sys, "real_prefix"):
        prefix_scheme = 'posix_prefix'
    else:
        prefix_scheme = 'posix_local'

    return {
        'prefix': prefix_scheme,
"""


EDITED = """
    'posix_home': {
        'purelib': '{base}/lib/python',
        },
    for scheme in ('posix_prefix', 'posix_home'):
    return {
        'prefix': 'posix_prefix',
"""


def test_debians_schemes_go() -> None:
    assert install.edited(SYSCONFIG, install.EDITS["3.11"]["sysconfig.py"]) == EDITED


def test_a_library_that_the_edits_were_not_made_for_is_refused() -> None:
    with pytest.raises(ValueError, match="matches 0 times"):
        install.edited("another library", install.EDITS["3.11"]["sysconfig.py"])


@pytest.mark.parametrize(
    ("recorded", "becomes"),
    [
        ("'prefix': '/usr',", "'prefix': '/usr/local',"),
        ("prefix=\t/usr\n", "prefix=\t/usr/local\n"),
        ("'/usr/include /usr/include'", "'/usr/local/include /usr/local/include'"),
        ("'/usr/include/python3.11'", "'/usr/local/include/python3.11'"),
        ("'/usr/lib/x86_64-linux-gnu/python3.11'", "'/usr/local/lib/python3.11'"),
        ("'/usr/bin/install -c'", "'/usr/bin/install -c'"),
        ("'-I/usr/include/tirpc'", "'-I/usr/include/tirpc'"),
        ("'/usr/share/zoneinfo'", "'/usr/share/zoneinfo'"),
        ("'/usr/share/python-wheels/'", "'/usr/local/lib/python3.11/ensurepip/_bundled'"),
    ],
)
def test_recorded_paths_move_and_programs_stay(recorded: str, becomes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "WHEELS", Path("/usr/local/lib/python3.11/ensurepip/_bundled"))
    assert install.moved_to_prefix(recorded, "x86_64-linux-gnu") == becomes


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns what Debian has installed of a project, as dpkg lists it."""
    packages = tmp_path / "dist-packages"
    for directory in (packages / "pytest", packages / "pytest-7.2.1.dist-info", packages / "py-1.egg-info"):
        directory.mkdir(parents=True)
        (directory / "file").write_text("contents")
    monkeypatch.setattr(install, "DEBIAN_PACKAGES", packages)
    monkeypatch.setattr(install, "SITE_PACKAGES", tmp_path / "site-packages")
    return packages


@pytest.mark.parametrize(
    ("information", "record", "rows"),
    [
        ("pytest-7.2.1.dist-info", "RECORD", {"pytest/file,,", "pytest-7.2.1.dist-info/file,,"}),
        ("py-1.egg-info", "installed-files.txt", {"../pytest/file", "file"}),
    ],
    ids=["wheel", "egg"],
)
def test_pip_can_replace_a_copied_project_by_its_record(
    information: str, record: str, rows: set[str], debian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "\n".join(map(str, [debian, debian / "pytest/file", debian / information / "file", "/usr/share/doc/x"]))
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, stdout=listed))
    install.copy_project(["python3-pytest"])
    copied = tmp_path / "site-packages"
    assert (copied / "pytest/file").read_text() == "contents"
    assert rows <= set((copied / information / record).read_text().splitlines())


def test_debian_13_has_its_schemes_in_a_package_and_no_distutils() -> None:
    edits = install.EDITS["3.13"]
    assert sorted(edits) == ["ensurepip/__init__.py", "site.py", "sysconfig/__init__.py"]
    of_13 = [text.replace("'{base}/lib/python'", "'{base}/lib/{implementation_lower}'") for text in (SYSCONFIG, EDITED)]
    assert install.edited(of_13[0], edits["sysconfig/__init__.py"]) == of_13[1]


ENTRY = b"name-and-code---"


def test_an_interpreter_loses_one_entry_and_keeps_its_size() -> None:
    entries = b"site-and-code---" + ENTRY + bytes(16)
    program = b"before" + entries + b"after"
    assert install.without_first(program, entries, 16) == b"before" + ENTRY + bytes(32) + b"after"


@pytest.mark.parametrize("copies", [0, 2])
def test_an_interpreter_without_one_clear_table_is_refused(copies: int) -> None:
    entries = b"site-and-code---" + bytes(16)
    with pytest.raises(ValueError, match=f"table of frozen modules {copies} times"):
        install.without_first(b"before" + entries * copies, entries, 16)


def test_the_layout_of_a_frozen_module_is_that_of_python_3_13() -> None:
    assert ctypes.sizeof(install.Frozen) == 24
    assert [getattr(install.Frozen, name).offset for name, _ in install.Frozen._fields_] == [0, 8, 16, 20]
