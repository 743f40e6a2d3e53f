"""What scripts/setup installs: exact versions with hashes, and no index that the files name."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {name: f"requirements/{name}.lock" for name in ("run", "build", "dev", "scan")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
RUN = [*PROJECT["project"]["dependencies"], *EXTRAS["aws"], *EXTRAS["batch"]]
WANTED = {
    "run": RUN,
    "build": [*GROUPS["build"], *PROJECT["build-system"]["requires"]],
    "dev": [*RUN, *EXTRAS["inspect"], *GROUPS["dev"]],
    "scan": GROUPS["scan"],
}


def locked(name: str) -> dict[str, str]:
    """The versions in a lock file; fails for a line that is not exact, or has no hash."""
    text = (ROOT / LOCKS[name]).read_text().replace("\\\n", " ")
    versions: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.+!]+)( ; [^\\#]+?)?((?: +--hash=sha256:[0-9a-f]{64})+) *", line)
        assert match, line[:100]
        versions[canonicalize_name(match[1])] = match[2]
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_each_line_is_one_version_with_hashes(name: str) -> None:
    versions = locked(name)
    assert "://" not in (ROOT / LOCKS[name]).read_text()
    for text in WANTED[name]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), text


def test_the_files_of_one_virtual_environment_agree() -> None:
    run, build, dev = locked("run"), locked("build"), locked("dev")
    assert run.items() <= dev.items()
    assert {name: version for name, version in build.items() if name in dev}.items() <= dev.items()


def test_setup_and_the_policy_scan_install_only_what_has_a_hash() -> None:
    for script in ("setup", "policy-scan"):
        text = (ROOT / "scripts" / script).read_text().replace("\\\n", " ")
        installs = [line for line in text.splitlines() if 'pip" install' in line]
        assert installs
        for line in installs:
            assert "--require-hashes" in line or "${locked[@]}" in line or "--no-index" in line, line
    assert "locked=(--require-hashes " in (ROOT / "scripts" / "setup").read_text()


@pytest.mark.parametrize("name", ["run", "dev"])
def test_setup_builds_only_the_package_without_a_wheel(name: str) -> None:
    text = (ROOT / "scripts" / "setup").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("wheels=")]
    script = f'lock={LOCKS[name]}; {line}; echo "$wheels"'
    wheels = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {canonicalize_name(each) for each in wheels.strip().split(",")} == locked(name).keys() - {"python-terraform"}
    assert "--no-binary" not in re.sub("#.*", "", text)
