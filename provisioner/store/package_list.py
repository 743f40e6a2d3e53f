"""Reads which Debian packages a system has, from dpkg's own record: bounded, as a machine may have written it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

STATUS = "var/lib/dpkg/status"
# A desktop with CUDA has about 3,000 packages and a record of 5 MB.
MAXIMUM_STATUS_BYTES = 8 << 20
MAXIMUM_PACKAGES = 20_000

# Debian Policy 5.6.1, 5.6.8 and 5.6.12: what names, architectures and versions are made of.
_FIELDS = (b"Package", b"Status", b"Architecture", b"Version")
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
    for fields in _paragraphs(status[:MAXIMUM_STATUS_BYTES]):
        name, architecture, version = (fields.get(key, "") for key in ("Package", "Architecture", "Version"))
        plain = _NAME.fullmatch(name) and _ARCHITECTURE.fullmatch(architecture) and _VERSION.fullmatch(version)
        if plain and fields.get("Status", "").endswith(" installed"):
            packages.add(f"{name}:{architecture}={version}")
    return tuple(sorted(packages)[:MAXIMUM_PACKAGES])


def _paragraphs(status: bytes) -> Iterator[dict[str, str]]:
    """Yields the fields that matter of one paragraph after the other, line by line: millions of lines cost little."""
    fields: dict[str, str] = {}
    for line in io.BytesIO(status):
        key, separator, value = line.rstrip(b"\n").partition(b": ")
        if separator and key in _FIELDS:
            fields[key.decode()] = value.decode(errors="replace")
        elif line == b"\n":
            yield fields
            fields = {}
    yield fields
