"""The few things an operator may set: PROVISIONER_* variables over the configuration file over defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from provisioner.errors import UsageError


class Settings(BaseModel):
    """Settings of this controller.

    Args:
        ca_bundle: PEM file of extra CA certificates that images trust, for networks with a proxy that
            signs its own; an empty string for none. Default: what SSL_CERT_FILE names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_bundle: str = ""

    @property
    def ca_bundle_path(self) -> Path | None:
        """The bundle as an existing file, or None.

        Raises:
            UsageError: it names no file.
        """
        if not self.ca_bundle:
            return None
        try:
            path = Path(self.ca_bundle).expanduser()
        except RuntimeError:  # ~name, and there is nobody of that name
            path = Path(self.ca_bundle)
        if not path.is_file():
            raise UsageError(
                f"The CA bundle {path} is not a file.",
                hint="Set ca_bundle in the configuration file, or PROVISIONER_CA_BUNDLE; empty means none.",
            )
        return path


def configuration_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the configuration file is looked for (XDG Base Directory Specification 0.8)."""
    config = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "provisioner" / "config.toml"


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings.

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
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The configuration file {path} cannot be read: {error}") from error
    if (named := environment.get("PROVISIONER_CA_BUNDLE")) is not None:
        values["ca_bundle"] = named
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"The configuration file {path} is not valid: {where}: {problem['msg']}") from error
