"""Finds the provisioner home of a command."""

from __future__ import annotations

from provisioner.base.errors import HostError
from provisioner.cli.command import progress
from provisioner.store.home import Home


def default_home() -> Home:
    """Returns the provisioner home and creates it if it does not exist.

    Raises:
        HostError: the home cannot be found or used.
    """
    hint = "Set PROVISIONER_HOME to a directory that you may write to."
    try:
        home = Home.default()
        if home.make():
            progress().note(f"Other users could enter the provisioner home {home.root}; its mode is now 0700.")
    except RuntimeError as error:  # ~name for a user that does not exist
        raise HostError("The provisioner home cannot be found: its user does not exist.", hint=hint) from error
    except OSError as error:
        raise HostError(f"The provisioner home {home.root} cannot be used: {error.strerror}.", hint=hint) from error
    return home
