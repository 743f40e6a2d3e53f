"""Reads the version of a Linux kernel from its file, which a family may have written. Starts nothing."""

from __future__ import annotations

import struct
from pathlib import Path

from provisioner.base.printable import beginning, printable

# Linux, Documentation/arch/x86/boot.rst: a signature, and a pointer to the version less 0x200.
SIGNATURE, SIGNATURE_AT = b"HdrS", 0x202
POINTER_AT, POINTER_LESS = 0x20E, 0x200
# The version stands in the boot sector's setup code, which has at most 64 sectors.
READ_BYTES = 64 << 10
CHARACTERS = 100


def of(kernel: Path) -> str:
    """Returns the release of an x86 kernel, such as 6.1.0-37-cloud-amd64.

    Raises:
        OSError: the file cannot be read.
        ValueError: it says no version.
    """
    with kernel.open("rb") as file:
        header = file.read(READ_BYTES)
    if header[SIGNATURE_AT : SIGNATURE_AT + len(SIGNATURE)] != SIGNATURE:
        raise ValueError(f"{kernel} is no x86 kernel")
    [pointer] = struct.unpack_from("<H", header, POINTER_AT)
    at = pointer + POINTER_LESS
    words = header[at : at + CHARACTERS].partition(b"\0")[0].decode(errors="replace").split()
    if not pointer or not words:
        raise ValueError(f"{kernel} says no version")
    return beginning(printable(words[0]), CHARACTERS)
