"""Every parser of what comes from outside takes any bytes: it returns a checked record, or refuses in its own words.

Nothing else may come out of a parser: no other exception, no record that cannot be written and read again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from pydantic import BaseModel

from provisioner.base.errors import (
    InfrastructureError,
    IsolationError,
    ProvisionerError,
    TaskError,
    TaskFamilyError,
    UsageError,
)
from provisioner.batch.records import RECORD as BATCH_RECORD
from provisioner.batch.records import Batches
from provisioner.batch.suite import load_suite
from provisioner.clouds.local.network import datagrams
from provisioner.clouds.local.network.egress import GUEST_ADDRESS, NEVER, PRIVATE, FrameFilter, parse_allow
from provisioner.driver.agent_frames import AgentFrames, FrameError
from provisioner.driver.task_driver import Answer, TaskDriver
from provisioner.environment.operations import read_submission, run_tests
from provisioner.family.build_steps import load_build_steps
from provisioner.family.env_file import load_env_file
from provisioner.family.manifest import parse_manifest
from provisioner.family.scores import classify_score, parse_intermediate
from provisioner.family.setup_data import parse_setup_data
from provisioner.family.source import check_module
from provisioner.isolation.questions import CanaryPorts, evaluate, questions
from provisioner.session import Session
from provisioner.ssh.exec_frames import ALIVE, EXIT, STARTED, STDERR, STDOUT, Answers, ExecViolation
from provisioner.ssh.exec_frames import frame as exec_frame
from provisioner.store.environments import RECORD as ENVIRONMENT_RECORD
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from provisioner.store.images import ImageStore
from tests.attacks.fuzzing import SCALARS, VALUES, changed, damaged, fuzz
from tests.unit.conftest import cloud, session  # noqa: F401 - fixtures
from tests.unit.fakes.world import environment

HERE = Path(__file__).resolve().parents[2]
LONGEST_MESSAGE = 16_000
T = TypeVar("T")

MODULE = (
    b'class TaskFamily:\n    standard_version = "0.5.0"\n\n    @staticmethod\n    def get_tasks():\n        return {}\n'
)
MANIFEST = (
    b'version: "1"\nmeta: {a: [1]}\ntasks:\n  main:\n    version: "2.0"\n    resources: {cpus: 2, memory_gb: 1.5, '
    b"gpu: {count_range: [1, 2], model: h100}}\n    scoring: {visible_to_agent: false}\n"
)
BUILD_STEPS = (
    b'[{"type": "shell", "commands": ["apt-get update"]}, {"type": "file", "source": "a", "destination": "/a"}]'
)
ENV_FILE = b"KEY=value\nexport OTHER='a b'\n# comment\nLINES=\"a\\nb\"\n"
SETUP = {
    "standard_version": "0.5.0",
    "tasks": {
        "main": {
            "permissions": ["full_internet"],
            "instructions": "Find the flag.\n",
            "required_environment_variables": ["KEY", "VM_IP_ADDRESS"],
            "aux_vm_spec": {
                "cpu_count_range": [0.5, 2],
                "ram_gib_range": [1, 4],
                "cpu_architecture": "x64",
                "gpu_spec": {"count_range": [1, 2.0], "model": "h100"},
                "base_image_type": "debian-12",
                "build_steps": [{"type": "shell", "commands": ["apt-get install -y docker.io"]}],
            },
        },
    },
    "has_score": True,
    "warnings": ["no get_instructions"],
}
AGENT = {"name": "a", "directory": "d", "command": "c"}
SCORE = {"status": "ok", "value": {"score": 0.5, "message": {"a": 1}, "details": {"b": [None]}}}
FAILURE = {"status": "error", "kind": "exception", "type": "ValueError", "message": "no", "traceback": "line 1"}


def _refuses(parse: Callable[[Any], object], *refusals: type[ProvisionerError]) -> Callable[[Any], None]:
    """Returns a check that the parser accepts a value or refuses it with an error that an operator can read."""

    def check(value: Any) -> None:
        message = "accepted"
        try:
            parsed = parse(value)
            if isinstance(parsed, BaseModel):
                assert type(parsed).model_validate_json(parsed.model_dump_json()) == parsed
        except refusals as error:
            message = error.message
        assert 0 < len(message) < LONGEST_MESSAGE
        assert message.replace("\n", "").isprintable()

    return check


def _from_file(path: Path, parse: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Returns a parser of bytes, from a parser of files."""

    def parse_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return parse(path)

    return parse_bytes


def test_setup_data() -> None:
    fuzz(changed(SETUP) | VALUES, _refuses(parse_setup_data, TaskFamilyError))


def test_manifests() -> None:
    fuzz(damaged(MANIFEST) | st.binary(max_size=200), _refuses(parse_manifest, TaskFamilyError))


def test_modules(tmp_path: Path) -> None:
    fuzz(damaged(MODULE), _refuses(_from_file(tmp_path / "fam.py", check_module), TaskFamilyError))


def test_build_steps(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    parse = _from_file(tmp_path / "build_steps.json", lambda path: load_build_steps(path.parent))
    fuzz(damaged(BUILD_STEPS), _refuses(parse, TaskFamilyError))


def test_env_files(tmp_path: Path) -> None:
    fuzz(damaged(ENV_FILE), _refuses(_from_file(tmp_path / ".env", load_env_file), UsageError))


def test_suites(tmp_path: Path) -> None:
    suite = (HERE / "examples" / "batch" / "suite.yaml").read_bytes()
    fuzz(damaged(suite), _refuses(_from_file(tmp_path / "suite.yaml", load_suite), UsageError))


@pytest.mark.parametrize("classify", [classify_score, parse_intermediate])
def test_results(classify: Callable[[object], BaseModel]) -> None:
    def check(result: object) -> None:
        try:
            json.dumps(result, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return  # the driver refuses such an answer before anything reads it
        classified: Any = classify(result)
        if classified.kind == "scored":
            assert isinstance(classified.score, float)
            assert abs(classified.score) < float("inf")
        else:
            assert classified.score is None or classified.score != classified.score
        classified.model_dump_json()

    fuzz(changed(SCORE) | changed(FAILURE) | VALUES, check)


class _Helper(TaskDriver):
    """Answers every operation with one result."""

    def __init__(self, result: object) -> None:
        self._answer = Answer(result, "", "")

    def call(self, *_: Any, **__: Any) -> Answer:
        return self._answer


def _or_refusal(work: Callable[[], T]) -> T | str:
    """Returns the result of some work, or the words in which a task is refused."""
    try:
        return work()
    except TaskError as error:
        message = error.message
    assert 0 < len(message) < LONGEST_MESSAGE
    return message


SUBMISSION = {"status": "ok", "value": {"found": True, "text": "42", "reason": ""}}
TESTS = {"status": "ok", "value": {"exit_code": 1}}
ENDED = {"status": "error", "kind": "exit", "message": "it ended", "exit_code": -9}


def test_answers_about_the_submission() -> None:
    def check(result: object) -> None:
        submission = _or_refusal(lambda: read_submission(_Helper(result)))
        assert submission is None or isinstance(submission, str)

    values = VALUES.map(lambda value: {"status": "ok", "value": value})
    fuzz(changed(SUBMISSION) | values | changed(FAILURE) | changed(ENDED) | VALUES, check)


def test_answers_about_a_familys_tests(session: Session) -> None:  # noqa: F811
    env = environment("env")

    def check(result: object) -> None:
        code = _or_refusal(lambda: run_tests(session, env, _Helper(result), []))
        assert isinstance(code, str) or -255 <= code <= 255

    codes = SCALARS.map(lambda code: {"status": "ok", "value": {"exit_code": code}})
    fuzz(changed(TESTS) | codes | changed(FAILURE) | changed(ENDED) | VALUES, check)


def test_records_of_environments(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    store = EnvironmentStore(home)
    valid = environment("env").model_dump_json(indent=2).encode()
    path = store.directory("env") / ENVIRONMENT_RECORD
    path.parent.mkdir()
    fuzz(damaged(valid), _refuses(_from_file(path, lambda _: store.find("env")), InfrastructureError))


def test_records_of_images(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    store = ImageStore(home)
    valid = b'{"name": "base", "kind": "base", "created_at": "2026-01-01T00:00:00Z", "needs": ["a"], "family": null}'
    path = store.path("base") / "image.json"
    path.parent.mkdir()
    fuzz(damaged(valid), _refuses(_from_file(path, lambda _: store.load("base")), InfrastructureError))
    (path.parent / "setup-data.json").write_text("{}")
    valid = json.dumps(SETUP).encode()
    parse = _from_file(path.parent / "setup-data.json", lambda _: store.setup_data("base"))
    fuzz(damaged(valid), _refuses(parse, InfrastructureError))


def test_records_of_batches(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    batches = Batches(home)
    valid = {
        "id": "b", "suite_file": "/s.yaml", "shared": False, "created_at": "2026-01-01T00:00:00Z", "version": "1",
        "suite": {"name": "s", "families": [{"path": "f"}], "agents": [AGENT]},
        "runs": [{"key": "k", "family": "f", "task": "t", "agent": "a", "repetition": 1}],
    }  # fmt: skip
    path = batches.directory("b") / BATCH_RECORD
    path.parent.mkdir(parents=True)
    fuzz(
        damaged(json.dumps(valid).encode()),
        _refuses(_from_file(path, lambda _: batches.find("b")), InfrastructureError),
    )


def test_allowlist_entries() -> None:
    def check(text: str) -> None:
        try:
            rule = parse_allow(text)
        except ValueError:
            return
        assert not any(network.overlaps(rule.network) for network in NEVER)

    fuzz(damaged(b"203.0.113.7/32:443").map(lambda data: data.decode(errors="replace")) | st.text(max_size=40), check)


def _frame(ethertype: bytes, rest: bytes) -> bytes:
    return b"\x52\x54\x00\x00\x03\x02" * 2 + ethertype + rest


# Ethernet, IPv4, ICMP, and the 28 bytes that it quotes.
LONGEST_REFUSAL = 14 + 20 + 8 + 28
FRAMES = st.one_of(
    st.binary(max_size=80),
    st.builds(_frame, st.sampled_from((b"\x08\x06", b"\x08\x00", b"\x86\xdd")), st.binary(max_size=60)),
    st.builds(
        lambda start, protocol, destination: _frame(
            b"\x08\x00", start + bytes(8) + protocol + bytes(6) + destination + b"data"
        ),
        st.sampled_from((b"\x45", b"\x46", b"\x60", b"\x4f")),
        st.sampled_from((b"\x01", b"\x06", b"\x11", b"\x84")),
        st.sampled_from((b"\x7f\0\0\1", b"\xa9\xfe\xa9\xfe", b"\x08\x08\x08\x08", b"\xc0\0\2\1", b"\xff" * 4)),
    ),
)


def test_frames_of_machines() -> None:
    """Whatever the frames and however their stream is cut, nothing passes but ARP and IPv4 to permitted addresses."""

    def check(drawn: tuple[list[bytes], list[int]]) -> None:
        frames, cuts = drawn
        stream = b"".join(struct.pack(">I", len(frame)) + frame for frame in frames)
        parts = [stream[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True)]
        taken: list[bytes] = []
        taken_in_parts: list[bytes] = []
        answers: list[bytes] = []
        whole = FrameFilter(taken.append, refuse=lambda frame: datagrams.refuse(frame, answers.append))
        cut = FrameFilter(taken_in_parts.append)
        passed = whole.feed(stream)
        assert b"".join(map(cut.feed, parts)) == passed
        assert taken_in_parts == taken
        assert all(len(answer) <= LONGEST_REFUSAL for answer in answers)
        rest, passing = passed, list(taken)
        while rest:
            length = struct.unpack_from(">I", rest)[0]
            frame, rest = rest[4 : 4 + length], rest[4 + length :]
            assert len(frame) == length
            passing.append(frame)
        for frame in passing:
            assert frame in frames
            if frame[12:14] != b"\x08\x06":
                assert frame[12:15] == b"\x08\x00\x45"
                assert not any(IPv4Address(frame[30:34]) in network for network in (*NEVER, *PRIVATE))

    fuzz(st.tuples(st.lists(FRAMES, max_size=8), st.lists(st.integers(0, 400), max_size=4)), check)


def test_streams_without_frames_end_the_connection() -> None:
    def check(data: bytes) -> None:
        frames = FrameFilter(lambda _: None)
        try:
            assert len(frames.feed(data)) <= len(data)
        except ValueError:
            assert data

    fuzz(st.binary(max_size=300), check)


def test_datagrams_of_machines() -> None:
    """A datagram is a part of its frame, has an address to go to, and its answer is a frame that is not too long."""

    def check(frame: bytes) -> None:
        datagram = datagrams.parse(frame)
        if datagram is None:
            return
        assert datagram.payload in frame
        assert datagram.flow.protocol in (datagrams.UDP, datagrams.ICMP)
        for answer in datagrams.frames(datagram.flow, datagram.mac, datagram.payload, 7):
            assert len(answer) <= datagrams.MTU + 14

    valid = [
        answer
        for flow in (datagrams.Flow(datagrams.UDP, 40000, b"\x08\x08\x08\x08", 53),)
        for answer in datagrams.frames(flow, b"\x52\x54\0\0\3\x15", b"x" * 40, 1)
    ]
    guest = socket.inet_aton(GUEST_ADDRESS)
    sent = tuple(frame[:26] + guest + frame[26:30] + frame[34:] for frame in valid)
    assert all(datagrams.parse(frame) for frame in sent)
    fuzz(damaged(*sent) | FRAMES, check)


def test_the_account_of_an_agent() -> None:
    """A machine that says anything instead of frames is refused, and costs no more than one frame."""

    def check(data: bytes) -> None:
        output: list[bytes] = []
        frames = AgentFrames(lambda _, piece: output.append(piece))
        with contextlib.suppress(FrameError):
            frames.feed(data, 0)
        # A note about lost output is shorter than the line that claims it is lost.
        assert sum(map(len, output)) <= len(data) + 64 * len(output)
        assert frames.end is None or frames.end.exit_code is None or -1 <= frames.end.exit_code <= 255

    valid = b'o 0 5\nhelloe 0 3\nerrb 0 0\nx 0 36\n{"exit_code": 0, "timed_out": false}'
    fuzz(damaged(valid) | st.binary(max_size=100), check)


def test_the_answers_of_an_exec_server() -> None:
    """Whatever comes in place of frames is refused, and no output comes out that did not go in."""

    def check(data: bytes) -> None:
        answers, output = Answers(), 0
        with contextlib.suppress(ExecViolation):
            for _, piece in answers.feed(data, 0):
                output += len(piece)
        assert output <= len(data)
        end = answers.end
        assert end is None or end.timed_out or (end.code is None) != (end.errno is None)
        assert end is None or end.code is None or 0 <= end.code <= 255
        assert end is None or end.text.isprintable()

    frames = exec_frame(STARTED) + exec_frame(STDOUT, b"out") + exec_frame(ALIVE) + exec_frame(STDERR, b"err")
    ends = (b'{"code": 7}', b'{"timed_out": true}', b'{"errno": 2, "what": "user", "text": "no user"}')
    fuzz(damaged(*(frames + exec_frame(EXIT, end) for end in ends)) | st.binary(max_size=100), check)


def test_answers_to_the_isolation_probes() -> None:
    asked = questions(environment("env"), "primary", "word", CanaryPorts(1, 2), ["10.0.2.2"])
    honest = [
        [user, probe.name, "not reached", "timed out"] for user, probes in asked.probes.items() for probe in probes
    ]
    valid = json.dumps(["word", honest]).encode()
    assert evaluate(asked, valid)
    fuzz(damaged(valid, b'["word", []]'), _refuses(lambda answer: evaluate(asked, answer), IsolationError))
