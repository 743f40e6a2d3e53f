"""Reads the operator's settings: PROVISIONER_* variables override the configuration file, which overrides defaults.

Knows where the Terraform modules and templates are, too.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from provisioner.base.clock import parse_duration
from provisioner.base.errors import UsageError
from provisioner.base.models import PrimaryDistribution, TimeLimits
from provisioner.base.validation import lines_of, listed

_PACKAGE = Path(__file__).parents[1]

Money = Annotated[Decimal, Field(ge=0, max_digits=12, decimal_places=6)]
HINT = "docs/reference/settings.md lists every setting."
# S3 user guide, "Bucket naming rules"; the prefix excludes characters that Terraform would evaluate.
STATE = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_./-]*)?")


class StandingBudgets(BaseModel):
    """Standing budgets, in US dollars.

    Args:
        month: for all launches of a calendar month (UTC); None for no such budget.
        projects: for all launches of a project, by its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    month: Money | None = None
    projects: dict[str, Money] = {}


class Settings(BaseModel):
    """Settings of this controller.

    Args:
        ca_bundle: PEM file of extra CA certificates that images trust, for networks whose proxy signs its own
            certificates; an empty string for none. Default: the file that SSL_CERT_FILE names.
        region, profile: the AWS region and profile; empty for those of the AWS configuration.
        state: `s3://bucket/prefix` where the aws cloud keeps Terraform's state; empty for local files.
        controller_cidrs: IPv4 networks from which this controller reaches machines in a cloud; empty for its own
            public address.
        prices: the operator's own price list (docs/how-to/budgets.md); empty for none.
        project: the project that launches count under.
        base_image: the base image of families whose manifest names none.
        disk_overcommit: local machines: how many times the host's free disk all their disks may have together; 1 lets
            every machine fill its disk.
        private_networks: local machines: private IPv4 networks that those with the internet reach, too.
        require_kvm: local machines: whether they start under KVM alone; emulation isolates nothing, says QEMU.
        templates: local machines: whether they resume from a frozen template of their image instead of booting.
        egress_gb: aws: how many gigabytes (10^9 bytes) the machines of an environment may send, if it has a way out.
        budget: the standing budgets.
        time_limits: how long the family's code may run, as durations such as 30m by name of the operation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_bundle: str = ""
    region: str = ""
    profile: str = ""
    state: str = ""
    controller_cidrs: tuple[str, ...] = ()
    prices: str = ""
    project: str = "default"
    base_image: PrimaryDistribution = "debian-12"
    disk_overcommit: float = Field(default=8, ge=1, le=1000)
    private_networks: tuple[str, ...] = ()
    require_kvm: bool = Field(default=False, strict=True)
    templates: bool = True
    egress_gb: Decimal = Field(default=Decimal(10), ge=1, le=100_000)
    budget: StandingBudgets = StandingBudgets()
    time_limits: TimeLimits = TimeLimits()

    def requiring_kvm(self, required: bool) -> Self:
        """Returns these settings with KVM required if they, or the caller, require it."""
        return self.model_copy(update={"require_kvm": self.require_kvm or required})

    @field_validator("state")
    @classmethod
    def _is_in_s3(cls, value: str) -> str:
        if value and not STATE.fullmatch(value):
            raise ValueError("it must have the form s3://bucket/prefix")
        return value

    @field_validator("time_limits", mode="before")
    @classmethod
    def _are_durations(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        seconds, problems = {}, []
        for name, text in value.items():
            try:
                seconds[f"{name}_seconds"] = parse_duration(str(text)).total_seconds()
            except UsageError as error:
                problems.append(f"{name}: {error.message} {error.hint or ''}".rstrip())
        known = [name.removesuffix("_seconds") for name in TimeLimits.model_fields]
        problems += [f"{name}: unknown key; known are {', '.join(known)}" for name in value if name not in known]
        if problems:
            raise ValueError("; ".join(problems))
        return seconds

    @field_validator("region", "profile")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        # The name goes into a Terraform file, where ${...} would be evaluated.
        if "$" in value or "%" in value or not value.isprintable():
            raise ValueError("a name must not contain $, % or control characters")
        return value

    @field_validator("controller_cidrs")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if ipaddress.IPv4Network(text).prefixlen < 8:
                raise ValueError(f"{text} is too large: a network may be at most a /8")
        return value

    @field_validator("private_networks")
    @classmethod
    def _are_private(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if (network := ipaddress.IPv4Network(text)).prefixlen < 8 or network.is_loopback or network.is_link_local:
                raise ValueError(f"{text} is no private network of at most a /8")
        return value

    @field_validator("project")
    @classmethod
    def _is_a_project(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
            raise ValueError("a project's name must have 1 to 64 letters, digits, and _ . -")
        return value

    @property
    def ca_bundle_path(self) -> Path | None:
        """Returns the bundle's path, or None if there is no bundle.

        Raises:
            UsageError: the bundle is not an existing file.
        """
        if not self.ca_bundle:
            return None
        try:
            path = Path(self.ca_bundle).expanduser()
        except RuntimeError:  # ~name for a user that does not exist
            path = Path(self.ca_bundle)
        if not path.is_file():
            raise UsageError(
                f"The CA bundle {path} is not a file.",
                hint="Set ca_bundle in the configuration file, or PROVISIONER_CA_BUNDLE; empty means none.",
            )
        return path


def checked(**values: object) -> Settings:
    """Returns settings from values that did not come from a file.

    Raises:
        UsageError: a value is not valid.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise UsageError(
            f"{problem['loc'][0]} {problem['input']!r} is not valid: {problem['msg'].removeprefix('Value error, ')}"
        ) from error


def data_directory(name: Literal["terraform", "templates"]) -> Path:
    """Returns the path of a data directory: inside the installed package, or next to it in a checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def configuration_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of the configuration file (XDG Base Directory Specification 0.8)."""
    config = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "provisioner" / "config.toml"


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings from variables and the configuration file.

    Raises:
        UsageError: the configuration file is not valid.
    """
    path = configuration_file(environment)
    inherited = environment.get("SSL_CERT_FILE", "")
    values: dict[str, object] = {"ca_bundle": inherited if Path(inherited).is_file() else ""}
    try:
        values.update(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        pass
    except UnicodeDecodeError as error:
        raise UsageError(f"The configuration file {path} is not UTF-8 text: see byte {error.start}.") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"The configuration file {path} cannot be read: {reason}") from error
    named = _named_by_variables(environment)
    try:
        return Settings.model_validate(values | named)
    except ValidationError as error:
        for problem in error.errors():
            if (name := str(problem["loc"][0])) in named:
                what = problem["msg"].removeprefix("Value error, ")
                raise UsageError(f"PROVISIONER_{name.upper()} is not valid: {what}") from error
        raise UsageError(
            f"The configuration file {path} is not valid:{listed(lines_of(error, _known_keys))}", hint=HINT
        ) from error


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys that are allowed in the place of an unknown one."""
    return list((StandingBudgets if location[0] == "budget" and len(location) > 1 else Settings).model_fields)


def _named_by_variables(environment: Mapping[str, str]) -> dict[str, object]:
    """Returns the settings that PROVISIONER_* variables name, each after its key in the configuration file."""
    values: dict[str, object] = {}
    if (bundle := environment.get("PROVISIONER_CA_BUNDLE")) is not None:
        values["ca_bundle"] = bundle
    if (networks := environment.get("PROVISIONER_CONTROLLER_CIDRS")) is not None:
        values["controller_cidrs"] = tuple(networks.replace(",", " ").split())
    # An empty one is as good as none.
    for key in ("project", "base_image", "egress_gb"):
        if value := environment.get(f"PROVISIONER_{key.upper()}"):
            values[key] = value
    return values
