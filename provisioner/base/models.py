"""Defines the frozen records that other modules share. Imports no other module of provisioner."""

from __future__ import annotations

from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator
from pydantic.json_schema import SkipJsonSchema

# The name of a machine within its environment: primary and aux, or what its owner calls a further machine.
Role = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$")]
MAXIMUM_VERSION_CHARACTERS = 200
# No machine may have these names, which mean something else beside it in the record or in the environment's directory.
NOT_MACHINES = frozenset(
    {"account", "allowlist", "controllers", "fetched", "keys", "logs", "market", "profile", "region", "state", "zone"}
)
Permission = Literal["full_internet"]
Architecture = Literal["x64", "arm64"]
# What a primary machine may be made of: the choice of a manifest, or of the settings.
PrimaryDistribution = Literal["debian-12", "debian-13"]
# What an aux VM may be made of (Task Standard, VMSpec.base_image_type).
AuxDistribution = Literal["debian-12", "ubuntu-20.04-cuda"]
Distribution = Literal["debian-12", "debian-13", "ubuntu-20.04-cuda"]


class Record(BaseModel):
    """A frozen record that refuses unknown keys."""

    # Serialise NaN as NaN: as null, an invalid submission would become no score.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class ShellBuildStep(Record):
    """A build step of commands, run by one shell that stops at the first failure."""

    type: Literal["shell"] = Field(description="runs commands")
    commands: tuple[str, ...] = Field(description="the lines of one script, which stops at the first failure")
    # Top-level files and directories of the family that these commands are the first to name. It follows from both, and
    # is no part of the record.
    reads: SkipJsonSchema[tuple[str, ...]] = Field(default=(), exclude=True)


class FileBuildStep(Record):
    """A build step that copies a file or directory; the source is relative to the family directory."""

    type: Literal["file"] = Field(description="copies a file, or the contents of a directory")
    source: str = Field(description="path in the family's directory")
    destination: str = Field(description="path in the machine; what is relative begins in the home directory")


BuildStep = Annotated[ShellBuildStep | FileBuildStep, Field(discriminator="type")]


class GpuSpec(Record):
    """The GPUs of a machine. count_range is inclusive."""

    count_range: tuple[int, int] = Field(description="how many, at least and at most")
    model: str = Field(description="the GPU's name, such as `a10` or `h100`")


class VMSpec(Record):
    """The result of get_aux_vm_spec (Task Standard, VMSpec). Ranges are inclusive; memory is in GiB."""

    cpu_count_range: tuple[float, float] = Field(description="vCPUs, at least and at most")
    ram_gib_range: tuple[float, float] = Field(description="memory in GiB, at least and at most")
    cpu_architecture: Architecture | None = Field(None, description="CPU architecture; the local cloud has its host's")
    gpu_spec: GpuSpec | None = Field(None, description="GPUs, which the local cloud does not have")
    base_image_type: AuxDistribution = Field("debian-12", description="what the machine is made of")
    build_steps: tuple[BuildStep, ...] = Field((), description="what its image has beside: [build steps](#build-steps)")


class TaskSetup(Record):
    """The setup data of one task. Warnings say what may spoil its results."""

    permissions: tuple[Permission, ...] = ()
    instructions: str = ""
    required_environment_variables: tuple[str, ...] = ()
    aux_vm_spec: VMSpec | None = None
    warnings: tuple[str, ...] = ()

    @property
    def full_internet(self) -> bool:
        """Whether the task may reach the internet."""
        return "full_internet" in self.permissions


class SetupData(Record):
    """What the family's code reports about its tasks, read inside a machine after install()."""

    standard_version: str | None = None
    tasks: dict[str, TaskSetup]
    has_score: bool = False
    has_intermediate_score: bool = False
    has_aggregate_scores: bool = False
    has_teardown: bool = False
    skip_chown_after_start: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """The family's warnings and those of its tasks, which name them."""
        return (*self.warnings, *(warning for task in self.tasks.values() for warning in task.warnings))


class MachineSize(Record):
    """The size of a machine: virtual CPUs, memory and root volume in GiB.

    Args:
        types: the cloud's machine types that fit, cheapest first; cpus and memory_gib are those of the first. Empty
            on a cloud that provides any size.
    """

    cpus: int
    memory_gib: float
    disk_gib: int
    architecture: Architecture = "x64"
    types: tuple[str, ...] = ()


class BaseImage(Record):
    """A kind of base image: whether it is for an aux VM, distribution and architecture."""

    role: Literal["primary", "aux"]
    distribution: Distribution = "debian-12"
    architecture: Architecture = "x64"

    @property
    def label(self) -> str:
        """The names of such images without the hash at their end: images of one label replace each other."""
        parts = ["base", self.role]
        if self.distribution != "debian-12":
            parts.append(self.distribution.replace(".", "-"))
        if self.architecture != "x64":
            parts.append(self.architecture)
        return "-".join(parts)


class Endpoint(Record):
    """The addresses of a machine.

    The controller reaches sshd at host and port: from the machine `jump` if there is one, or from the network of the
    process that locks `pidfile`, a file in the machine's directory. private_address is on the environment's own link;
    None without an aux VM. instance_id is the cloud's id of the machine. origin says how the machine started
    (`template`, or `boot` and why, if that was not meant); empty where there is only one way.
    """

    host: str
    port: int
    private_address: str | None = None
    jump: Role | None = None
    pidfile: Literal["run/qemu.pid", "qemu.pid"] | None = None
    instance_id: str | None = None
    origin: str = Field(default="", max_length=500)


class Destination(Record):
    """An allowlisted destination: IPv4 network in CIDR form, TCP port, and the host names that resolved to it."""

    cidr: str
    port: int = Field(ge=1, le=65535)
    host_names: tuple[str, ...] = ()


class Phase(Record):
    """A finished phase of an environment's life, with its duration in seconds."""

    name: str = Field(max_length=200)
    # A clock may be set while it lasts; three centuries are more than any clock is wrong by.
    seconds: float = Field(ge=-1e10, le=1e10)


class ProbeResult(Record):
    """The result of a probe: whether it `reached` its target, and whether the permission makes that `expected`."""

    machine: Role
    user: str
    probe: str
    reached: bool
    expected: bool
    detail: str = ""


@lru_cache(maxsize=1000)
def _kept(result: ProbeResult) -> ProbeResult:
    """Returns the equal result that is in memory already, as hundreds of environments have the same ones."""
    return result


class ScoreLogEntry(Record):
    """An intermediate score (Task Standard, IntermediateScoreResult). NaN is an invalid submission, None a failure."""

    score: float | None
    message: dict[str, Any] = {}
    details: dict[str, Any] = {}
    scored_at: AwareDatetime
    elapsed_seconds: float


class Outcome(Record):
    """How an environment was scored at its end, or why it has no score.

    Args:
        status: the kind of result (family/scores.py).
        details: the family's traceback, if its scoring failed.
    """

    status: str = Field(max_length=40)
    score: float | None = Field(default=None, allow_inf_nan=False)
    message: str = Field(default="", max_length=10_000)
    details: str = Field(default="", max_length=100_000)
    scored_at: AwareDatetime


class Breakdown(Record):
    """What made an environment end early, and in which phase of its life; that is empty if it is not known."""

    phase: str = Field(default="", max_length=200)
    message: str = Field(max_length=10_000)
    at: AwareDatetime


Seconds = Annotated[float, Field(ge=1, le=7 * 86400)]


class TimeLimits(Record):
    """How long the family's code may run in a machine: afterwards it is killed, and counts as failed.

    Args:
        start_seconds: for start(). An hour is a quarter of the default time to live.
        intermediate_score_seconds, aggregate_scores_seconds, score_seconds: for each call of that function.
        teardown_seconds: for teardown(), which delays the destruction of machines that cost money.
        tests_seconds: for the family's own pytest files.
    """

    start_seconds: Seconds = 3600
    intermediate_score_seconds: Seconds = 1800
    aggregate_scores_seconds: Seconds = 1800
    score_seconds: Seconds = 3600
    teardown_seconds: Seconds = 120
    tests_seconds: Seconds = 7200


Status = Literal["creating", "ready", "destroying", "unverified"]


class MachineRecord(Record):
    """A machine of an environment: its image's name, its size, and the user that the driver logs in as.

    Args:
        distribution: that of its base image; None in records that do not say.
        hostname: its host name, by which the others reach it; empty for its role.
    """

    image: str
    distribution: Distribution | None = None
    size: MachineSize
    user: str
    hostname: str = Field(default="", pattern=r"^([a-z]([a-z0-9-]{0,30}[a-z0-9])?)?$")


class Environment(Record):
    """The record of an environment or image builder, kept in its directory as environment.json.

    Args:
        status: `unverified` after a destroy that the cloud could not confirm.
        attended: whether it belongs to a running command, and is an orphan once that command has ended.
        shared_ledger: whether its reservation is in the database that workers share, not in the home's ledger.
        family_version: as the family's manifest has it; empty if it has none.
        placement: its place in the cloud, in the cloud's own terms (region, zone, machine types).
        batch: the batch that it belongs to; empty for none.
        label: whose it is, in the words of the program that uses it; empty for none.
        expires_at: the end of its time to live: its machines end then, whatever happens.
        usd_per_hour: its price in the place where it was created; None until then.
        worst_usd_per_hour: its highest price in any place that may be tried.
        time_limits: how long the family's code may run in it.
        snapshot: the snapshot that its machines resumed from; empty if they booted.
        addresses_of: the environment from whose id its private addresses follow; empty for its own.
        egress_gb: how many gigabytes (10^9 bytes) its machines may send; 0 without a bound: it has no way out, or the
            cloud does not bill traffic.
        usd_per_gb: their price.
        overrun: why its machines were ended; empty unless they sent more.
        started_at: when start() succeeded. In a copy, the time in which it was frozen does not count.
        agent_at: when an agent began, of a batch or of Inspect, which happens only once in each environment.
        agent_files: the SHA-256 of the last agent's files and links, as they were sent, in hex; empty with Inspect.
        agent_ended_at, agent_exit_code: of the last agent; the code is None if its time ran out or if it is not known.
        outcome: of the last scoring at the end.
        breakdown: why it was cleared away before its end.
        versions: of the programs that made its machines, by their names.
        gone_at: when the cloud confirmed that nothing of it is left; None until then.
        recorded: whether calls, terminals and packets are recorded.
        recording: the hash that its sealed logs have (recording/manifest.py); empty until it is destroyed.
    """

    id: str
    kind: Literal["task", "builder"] = "task"
    cloud: str
    placement: dict[str, str] = {}
    stack: str
    family: str
    task: str | None
    family_version: str = Field(default="", max_length=MAXIMUM_VERSION_CHARACTERS)
    status: Status
    shared_ledger: bool = False
    attended: bool = False
    batch: str = ""
    label: str = Field(default="", max_length=200)
    created_at: AwareDatetime
    expires_at: AwareDatetime
    usd_per_hour: Decimal | None = None
    worst_usd_per_hour: Decimal = Decimal(0)
    egress_gb: Decimal = Decimal(0)
    usd_per_gb: Decimal = Decimal(0)
    overrun: str = ""
    time_limits: TimeLimits = TimeLimits()
    setup: TaskSetup
    has_score: bool = False
    has_intermediate_score: bool = False
    has_aggregate_scores: bool = False
    has_teardown: bool = False
    score_visible_to_agent: bool = True
    full_internet: bool
    allowed_destinations: tuple[Destination, ...] = ()
    machines: dict[Role, MachineRecord]
    endpoints: dict[Role, Endpoint] = {}
    probes: tuple[ProbeResult, ...] = ()
    phases: tuple[Phase, ...] = ()
    score_log: tuple[ScoreLogEntry, ...] = ()
    snapshot: str = ""
    addresses_of: str = ""
    started_at: AwareDatetime | None = None
    agent_at: AwareDatetime | None = None
    agent_files: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    agent_ended_at: AwareDatetime | None = None
    agent_exit_code: int | None = Field(default=None, ge=-255, le=255)
    outcome: Outcome | None = None
    breakdown: Breakdown | None = None
    versions: dict[str, Annotated[str, Field(max_length=200)]] = Field(default={}, max_length=50)
    gone_at: AwareDatetime | None = None
    recorded: bool = False
    recording: str = Field(default="", pattern="^([0-9a-f]{64})?$")

    @field_validator("probes")
    @classmethod
    def _kept_once(cls, probes: tuple[ProbeResult, ...]) -> tuple[ProbeResult, ...]:
        return tuple(map(_kept, probes))

    @property
    def needs_command(self) -> bool:
        """Whether a command has to be managing it. Without a running one it is an orphan, which `sweep` removes."""
        return self.status != "ready" or self.attended

    @property
    def is_ending(self) -> bool:
        """Whether its destruction has begun, which nothing takes back."""
        return self.status in ("destroying", "unverified")

    @property
    def has_way_out(self) -> bool:
        """Whether the machines reach anything beside each other."""
        return self.full_internet or bool(self.allowed_destinations)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """The cloud's ids of the machines that were created, where it has such."""
        return tuple(endpoint.instance_id for endpoint in self.endpoints.values() if endpoint.instance_id)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The machines' roles, the primary machine's first."""
        return tuple(sorted(self.machines, key=lambda role: (role != "primary", role)))

    def hostname(self, role: Role) -> str:
        """Returns a machine's host name."""
        return self.machines[role].hostname or role

    def role_of(self, name: str) -> Role | None:
        """Returns the role of the machine that has a role or host name; None if there is none."""
        named = {self.hostname(role): role for role in self.machines}
        return name if name in self.machines else named.get(name)

    @field_validator("machines")
    @classmethod
    def _have_names_of_their_own(cls, value: dict[Role, MachineRecord]) -> dict[Role, MachineRecord]:
        if not NOT_MACHINES.isdisjoint(value):
            raise ValueError(f"no machine may be called {sorted(NOT_MACHINES & value.keys())[0]}")
        return value

    @field_validator("id", "stack")
    @classmethod
    def _is_a_safe_name(cls, value: str) -> str:
        if not value or not all(c.isascii() and (c.isalnum() or c in "-_") for c in value):
            raise ValueError("a name must consist of ASCII letters, digits, - and _")
        return value
