"""Keeps the proof of an environment's isolation among its logs: questions, answers, and the view from outside.

It is written when the proof ends, sealed with the other logs, and untrusted when it is read back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from provisioner.base import strict_json
from provisioner.base.models import Record, Role
from provisioner.base.printable import beginning, printable
from provisioner.base.redaction import Redactor
from provisioner.recording.manifest import read

PROOF = "isolation.json"
# A proof of the most machines and the longest allowlist, whose details are the worst, has about 6 MB.
LIMIT_BYTES = 8 << 20
MAXIMUM_VALUES = 250_000
# Of a probe's detail, which is the machine's; and of each other text.
DETAIL_CHARACTERS = 100
TEXT_CHARACTERS = 1000
MOST_MACHINES = 20
MOST_ANSWERS = 1000
MOST_DIFFERENCES = 200
# How many names of probes, and how many contradictions, a compact form has.
MOST_NAMES = 40
MOST_CONTRADICTIONS = 12

MOST_DEVICES = 64
NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
# Its own, and ours (clouds/local/vm/bubblewrap.py).
FILTERS_OF_QEMU = 2
MOST_FILTERS = 64

Text = Annotated[str, Field(max_length=TEXT_CHARACTERS)]
Word = Annotated[str, Field(pattern=r"^[ -~]{0,100}$")]


class Answer(Record):
    """A probe that a machine was asked to send, and its answer.

    Args:
        user: the user that had to send it.
        expected: whether the permission promises that it reaches its target; otherwise it must not.
        reached: whether it did; None if the machine gave no valid answers.
        detail: the machine's own words.
    """

    user: Literal["root", "agent"]
    probe: Text
    expected: bool
    reached: bool | None
    detail: str = Field(default="", max_length=DETAIL_CHARACTERS)


class Enclosure(Record):
    """How the kernel encloses a process beside a machine: /proc/PID/status and /proc/PID/ns, as proc(5) describes them.

    Args:
        uid: its effective user, as the controller sees it.
        seccomp: how many filters of system calls it runs under.
        capabilities: the effective ones, in hexadecimal.
        namespaces: those that are not the controller's own.
    """

    uid: int = Field(ge=0, lt=1 << 32)
    seccomp: int = Field(ge=0, le=MOST_FILTERS)
    no_new_privileges: bool
    capabilities: str = Field(pattern=r"^[0-9a-f]{16}$")
    namespaces: tuple[Literal["ipc", "mnt", "net", "pid", "user", "uts"], ...] = Field(max_length=len(NAMESPACES))


class Surface(Record):
    """What a machine meets of its host, as seen from outside.

    Args:
        accelerator: what runs its instructions.
        qemu, passt: versions; passt's is empty if no card leads to it.
        devices: the PCI functions, by place and kind.
        qemu_process, proxy_process: QEMU, and the egress proxy if there is one.
    """

    accelerator: Literal["KVM", "TCG"]
    qemu: Word
    passt: Word = ""
    devices: tuple[Word, ...] = Field(max_length=MOST_DEVICES)
    qemu_process: Enclosure
    proxy_process: Enclosure | None = None

    def differences(self) -> Iterator[str]:
        """Yields a line for each way in which a process beside the machine is not enclosed as it must be."""
        for name, process in (("QEMU", self.qemu_process), ("its egress proxy", self.proxy_process)):
            for kind, what in (("mnt", "mount"), ("pid", "PID")):
                if process and kind not in process.namespaces:
                    yield f"{name} does not run in its own {what} namespace"
            if process and not process.no_new_privileges:
                yield f"{name} does not run without new privileges"
            if process and process.capabilities.strip("0"):
                yield f"{name} does not run without capabilities"
        if self.qemu_process.seccomp < FILTERS_OF_QEMU:
            yield "QEMU does not run under two seccomp filters"


class Proof(Record):
    """One proof of an environment's isolation.

    Args:
        environment: its id.
        full_internet, allowlist: what its permission lets it reach; the allowlist as `NETWORK:PORT`.
        began_at, ended_at: when the machines were asked, and when the last view from outside was there.
        proven: whether all of it is as promised.
        problem: what ended the proof early, or was not as promised, in a line; empty if it is proven.
        answers: by machine, in the order in which they were asked.
        canary: the machines whose word reached the controller's loopback; None if the proof ended before.
        differences: what the cloud saw that is not as the permission promises; None if it was not asked.
        surface: what each machine meets of its host; empty where the cloud does not show it.
    """

    version: Literal[1] = 1
    environment: Annotated[str, Field(max_length=200)]
    full_internet: bool
    allowlist: tuple[Text, ...] = Field(default=(), max_length=MOST_ANSWERS)
    began_at: AwareDatetime
    ended_at: AwareDatetime
    proven: bool
    problem: Text = ""
    answers: dict[Role, Annotated[tuple[Answer, ...], Field(max_length=MOST_ANSWERS)]] = Field(max_length=MOST_MACHINES)
    canary: tuple[Role, ...] | None = Field(default=None, max_length=MOST_MACHINES)
    differences: tuple[Text, ...] | None = Field(default=None, max_length=MOST_DIFFERENCES)
    surface: dict[Role, Surface] = Field(default={}, max_length=MOST_MACHINES)

    @model_validator(mode="after")
    def _says_what_its_answers_say(self) -> Self:
        for role, answers in self.answers.items():
            if len({(answer.user, answer.probe) for answer in answers}) < len(answers):
                raise ValueError(f"the {role} machine has two answers to one probe")
        looked = self.canary is not None and self.differences is not None
        is_enclosed = not any(differences_of(self.surface))
        is_proven = looked and not self.problem and self.probes > 0 and not any(self.contradictions()) and is_enclosed
        if self.proven != is_proven:
            raise ValueError(f"it says proven {str(self.proven).lower()}, and what was seen says otherwise")
        return self

    @property
    def probes(self) -> int:
        """How many probes were asked for, of all machines and users."""
        return sum(map(len, self.answers.values()))

    @property
    def reached(self) -> int:
        """How many probes reached their targets."""
        return sum(answer.reached is True for answers in self.answers.values() for answer in answers)

    def contradictions(self) -> Iterator[str]:
        """Yields a line for each thing that was seen and is not as promised."""
        yield from (f"seen from outside: {difference}" for difference in self.differences or ())
        yield from (f"{role} machine: its word reached the controller's loopback" for role in self.canary or ())
        for role, answers in self.answers.items():
            for answer in answers:
                if answer.reached != answer.expected:
                    what = {True: "reached", False: "not reached", None: "no valid answer"}[answer.reached]
                    yield f"{role} machine, as {answer.user}: {answer.probe}: {what}"

    def line(self) -> str:
        """Says what came of it in one line."""
        if not self.proven:
            return f"isolation NOT proven: {self.problem or next(self.contradictions(), 'no machine was asked')}"
        seen = f"{self.reached} reached as promised, nothing else" if self.reached else "nothing reached"
        under = "".join(f", under {name}" for name in sorted({each.accelerator for each in self.surface.values()}))
        return f"isolation proven: {self.probes} probes, {seen}{under}"

    def facts(self) -> dict[str, Any]:
        """Returns what is sealed of it with the facts of its environment."""
        return {
            "proven": self.proven,
            "probes": self.probes,
            "reached": self.reached,
            "contradictions": sum(1 for _ in self.contradictions()),
            "ended_at": self.ended_at.isoformat(),
            **self.model_dump(mode="json", include={"surface"}, exclude_defaults=True),
        }

    def compact(self) -> dict[str, Any]:
        """Returns what had to be reached, what must not be, and what was seen, without the single answers. Bounded."""
        wrong = list(self.contradictions())
        return {
            **self.facts(),
            "problem": self.problem,
            "began_at": self.began_at.isoformat(),
            "probes_of": {role: len(answers) for role, answers in self.answers.items()},
            "must_reach": self._names(expected=True),
            "must_not_reach": self._names(expected=False),
            "reached_canary": None if self.canary is None else list(self.canary),
            "seen_from_outside": None if self.differences is None else len(self.differences),
            "not_as_promised": wrong[:MOST_CONTRADICTIONS],
        }

    def _names(self, *, expected: bool) -> list[str]:
        answers = (answer for each in self.answers.values() for answer in each if answer.expected is expected)
        names = list(dict.fromkeys(answer.probe for answer in answers))
        more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
        return [*names[:MOST_NAMES], *more]


def differences_of(surface: Mapping[Role, Surface]) -> Iterator[str]:
    """Yields a line for each process beside a machine that is not enclosed as it must be."""
    for role, seen in surface.items():
        yield from (f"{role} machine: {difference}" for difference in seen.differences())


def clean(text: str, redactor: Redactor, limit_characters: int = TEXT_CHARACTERS) -> str:
    """Returns a text as a proof may have it: in one line, without secrets, and bounded."""
    return beginning(printable(redactor.redact(text)), limit_characters)


def load(directory: Path) -> Proof:
    """Reads the proof among the logs of an environment.

    Raises:
        OSError: there is none, or it is no regular file.
        ValueError: it is none, contradicts itself, or is too large.
    """
    data = read(directory, PROOF, LIMIT_BYTES)
    return Proof.model_validate(strict_json.parse(data, limit_bytes=LIMIT_BYTES, maximum_values=MAXIMUM_VALUES))


def find(directory: Path) -> Proof | None:
    """Returns the proof among the logs of an environment; None if there is none, or if it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return load(directory)
    return None
