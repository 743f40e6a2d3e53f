"""Looks for secrets in a family's files, which are all copied into its image. Shows none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provisioner.family.checks.finding import Finding
from provisioner.family.loader import TaskFamily

MAXIMUM_FILES = 5000
MAXIMUM_FILE_BYTES = 1 << 20
MAXIMUM_TOTAL_BYTES = 64 << 20
# As the search of a finished image has it: shorter values are found by chance.
SHORTEST_VALUE = 8

# Each begins with a literal, which is found ten times as fast as a word's boundary: that is looked for behind it.
_PATTERNS = {
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}"),
    "an AWS access key": re.compile(rb"A(?<=\bA)(?:KIA|SIA)[A-Z2-7]{16}\b"),
    "a GitHub token": re.compile(rb"g(?<=\bg)(?:h[pousr]_[A-Za-z0-9]{36}|ithub_pat_[A-Za-z0-9_]{60,})\b"),
    "a Slack token": re.compile(rb"xox(?<=\bxox)[abprs]-[A-Za-z0-9-]{20,}"),
    "an OpenAI or Anthropic key": re.compile(rb"sk-(?<=\bsk-)(?:ant-|proj-)[A-Za-z0-9_-]{20,}"),
}
_WHY = "The family's files are copied into the image, where root of the primary machine can read them."
_FIX = (
    "Remove the secret from the file, pass it with --env-file, and list its variable in "
    "required_environment_variables. If the task needs the file, write it in start(), from os.environ."
)


def secret_findings(family: TaskFamily, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yields files that hold a value of the env file, or what looks like a secret."""
    values = {name: value.encode() for name, value in variables.items() if len(value) >= SHORTEST_VALUE}
    left_bytes = MAXIMUM_TOTAL_BYTES
    for name in family.files[:MAXIMUM_FILES]:
        path = family.directory / name
        if left_bytes <= 0:
            break
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            text = file.read(min(MAXIMUM_FILE_BYTES, left_bytes))
        left_bytes -= len(text)
        yield from _in_file(name, text, values)
    else:
        if len(family.files) <= MAXIMUM_FILES:
            return
    yield Finding(
        "warning", "not-checked", "", None, "The family is too large to look for secrets in all of its files.",
        f"At most {MAXIMUM_FILES} files and {MAXIMUM_TOTAL_BYTES >> 20} MiB are searched, 1 MiB of each.",
        "Nothing. The values of the env file are searched for in the finished image as well.",
    )  # fmt: skip


def _in_file(name: str, text: bytes, values: Mapping[str, bytes]) -> Iterator[Finding]:
    for variable, value in values.items():
        if value in text:
            yield Finding(
                "warning", "secret-in-file", name, _line(text, text.index(value)),
                f"The file holds the value of {variable} from the env file.",
                "The build fails if the finished image still holds it.", _FIX,
            )  # fmt: skip
    for what, pattern in _PATTERNS.items():
        if match := pattern.search(text):
            yield Finding(
                "warning", "secret-in-file", name, _line(text, match.start()),
                f"The file holds what looks like {what}.", _WHY,
                f"{_FIX} If it is a part of the task, and opens nothing else, leave it.",
            )  # fmt: skip


def _line(text: bytes, offset: int) -> int:
    return text.count(b"\n", 0, offset) + 1
