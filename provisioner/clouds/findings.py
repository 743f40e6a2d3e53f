"""What a cloud says of machines and of what exists for an environment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from provisioner.models import Record, Role


@dataclass(frozen=True)
class TerminationReason:
    """Why a machine no longer runs, as far as the cloud says.

    Args:
        message: in the cloud's words; empty where it gives none.
        from_within: whether the machine was switched off from inside, or may itself have made its host end it. None if
            the cloud cannot tell: it neither blames the machine nor excuses it.
    """

    message: str = ""
    from_within: bool | None = False


@dataclass(frozen=True)
class EnvironmentResources:
    """What exists in a cloud under the id of one environment, however it got there.

    Args:
        environment: the id that the resources' tags or paths name.
        resources: a description of each.
        region: where they are; empty where a cloud has no regions.
        home: the identity of the provisioner home that created them; empty where it is not known.
        owner: the user that created them.
        created_at, expires_at, leased_until: as the tags and the cloud say; None where they do not.
    """

    environment: str
    resources: tuple[str, ...] = ()
    region: str = ""
    home: str = ""
    owner: str = ""
    created_at: datetime | None = None
    expires_at: datetime | None = None
    leased_until: datetime | None = None


class UnrecordedImage(Record):
    """An image in the cloud that a provisioner home has made and this home does not have: in use elsewhere, or lost.

    Args:
        home: the identity of the home that made it; empty where it is not known.
        owner: the user that created it.
        gib: the size of its disk; what is stored of it may be less.
        used_at: when a machine last started from it; None where the cloud does not say.
        removal: the shell commands that delete it.
    """

    name: str
    region: str
    home: str
    owner: str
    gib: int
    created_at: datetime
    used_at: datetime | None
    removal: tuple[str, ...]


@dataclass(frozen=True)
class Scarcity:
    """Describes what limits how many environments exist at once on a cloud.

    Args:
        room: what has room, as the beginning of "... for 3 of 5 environments".
        remedy: how to have more of it, as a sentence.
        each_controller: whether each controller has its own, rather than all of an account the same.
    """

    room: str
    remedy: str
    each_controller: bool


@dataclass(frozen=True)
class Capture:
    """What passed through one card of a machine.

    Args:
        role: the machine's.
        card: the card's name: `link`, or `internet`.
        path: a file in libpcap's format, which may be growing.
    """

    role: Role
    card: str
    path: Path
