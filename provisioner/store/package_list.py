"""Reads which Debian packages a system has, from dpkg's own record: bounded, as a machine may have written it."""

from __future__ import annotations

import re

STATUS = "var/lib/dpkg/status"
# A desktop with CUDA has about 3,000 packages and a record of 5 MB.
MAXIMUM_STATUS_BYTES = 16 << 20
MAXIMUM_PACKAGES = 20_000

# Debian Policy 5.6.1, 5.6.8 and 5.6.12: what names, architectures and versions are made of.
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{1,99}")
_ARCHITECTURE = re.compile(r"[a-z0-9-]{1,32}")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+:~-]{0,99}")


def installed_packages(status: bytes) -> tuple[str, ...]:
    """Returns the installed packages as NAME:ARCHITECTURE=VERSION, which apt-get understands too, sorted. Pure.

    Args:
        status: the contents of STATUS. Only the first MAXIMUM_STATUS_BYTES and MAXIMUM_PACKAGES count; what is not
            a package is left out.
    """
    packages = set()
    for paragraph in status[:MAXIMUM_STATUS_BYTES].decode(errors="replace").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.split("\n") if ": " in line and line[0] != " ")
        name, architecture, version = (fields.get(key, "") for key in ("Package", "Architecture", "Version"))
        plain = _NAME.fullmatch(name) and _ARCHITECTURE.fullmatch(architecture) and _VERSION.fullmatch(version)
        if plain and fields.get("Status", "").endswith(" installed"):
            packages.add(f"{name}:{architecture}={version}")
    return tuple(sorted(packages)[:MAXIMUM_PACKAGES])
