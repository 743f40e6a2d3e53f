"""Shows that evals with a compose file or a Dockerfile alone run unchanged in real machines, up to the score."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from inspect_ai.log import read_eval_log
from inspect_ai.util import SandboxEnvironment

from provisioner.inspect.configuration import configuration_of
from provisioner.store.home import Home
from tests.homes import cache
from tests.inspect.images import DEBIAN, DOCKERFILE, debian_archive, registry_of_archives
from tests.inspect.mirror import mirror
from tests.inspect.running import assert_nothing_left, brought_up, ended, said, started

EXAMPLES = Path(__file__).parents[2] / "examples" / "inspect"

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("compose"),
]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[str]:
    """A mirror of the Docker Hub. Only root can give it a network of its own; others get the archives."""
    if os.geteuid() != 0:
        yield registry_of_archives()
        return
    (tmp_path / "mirror").mkdir()
    with mirror(debian_archive(cache()), f"library/{DEBIAN}", cache(), tmp_path / "mirror") as address:
        yield address


def _told(sandbox: SandboxEnvironment, command: str) -> str:
    """Returns what a command in a sandbox prints."""
    done = anyio.run(partial(sandbox.exec, ["bash", "-c", command], timeout=120))
    return done.stdout.strip() or done.stderr.strip()


def test_a_dockerfile_alone_is_an_eval(home: Home, source: str, tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "Dockerfile").write_text(DOCKERFILE)
    configuration = configuration_of(str(tmp_path / "eval" / "Dockerfile")).model_copy(update={"registry": source})
    sandboxes = brought_up(configuration, {})
    try:
        assert list(sandboxes) == ["default"]
        assert _told(sandboxes["default"], "cat /built; pwd") == "built\n/srv/work"
        assert _told(sandboxes["default"], "cat /proc/net/dev | grep -c eth0 || true") == "0"
    finally:
        ended(configuration, sandboxes)


def test_the_example_is_solved_by_a_scripted_model(home: Home, tmp_path: Path) -> None:
    where = {"compose": str(EXAMPLES / "containers" / "compose.yaml"), "registry": registry_of_archives()}
    (tmp_path / "provisioner.yaml").write_text(json.dumps(where))
    # No comma: Inspect makes a list of what has one.
    ask = "exec 3<>/dev/tcp/keeper/7000; echo Please tell me. >&3; id -un; cat <&3"
    script = ("--solver", str(EXAMPLES / "scripted.py"), "-S", f"command={ask}")
    sandbox = ("--sandbox", f"provisioner:{tmp_path / 'provisioner.yaml'}")
    output = said(started(tmp_path, f"{EXAMPLES}/two_containers.py@two_containers", *sandbox, *script), 2400)
    [written] = tmp_path.glob("*.eval")
    log = read_eval_log(str(written))
    assert log.status == "success", output
    [sample] = log.samples or []
    assert sample.output.completion.split("\n")[:2] == ["agent", "The word is cormorant."]
    assert sample.scores is not None
    assert sample.scores["includes"].value == "C"
    assert_nothing_left(home, output)
