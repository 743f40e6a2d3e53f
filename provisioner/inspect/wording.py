"""Says in the words of Inspect's users what our messages say in those of the command line. Pure.

What they can change is the sandbox's configuration, and the arguments of our own tasks.
"""

from __future__ import annotations

import re

# Commands that a message names are the reader's to run as they are.
_COMMAND = re.compile(r"(`provisioner [^`]*`)")
# The first that fits counts: the longer ones stand before what they contain.
_WORDS = (
    ("--region, --profile, --spot and --state", "`region` and `spot`"),
    ("--cloud aws", "`cloud: aws` (in provisioner.yaml, or -T cloud=aws)"),
    ("--cloud", "`cloud` (in provisioner.yaml, or -T cloud=CLOUD)"),
    ("Give --region (in a suite: regions), or set AWS_REGION", "Give `region` in provisioner.yaml, or set AWS_REGION"),
    ("--region", "`region` (in provisioner.yaml, or set AWS_REGION)"),
    ("--spot", "`spot` of provisioner.yaml"),
    ("--ttl", "`ttl` (in provisioner.yaml, or -T ttl=TTL)"),
    ("--budget", "`budget` (in provisioner.yaml, or -T budget=USD)"),
    ("--env-file", "`env_file` (in provisioner.yaml, or -T secrets_env_path=FILE)"),
    ("--allow", "`allow` in provisioner.yaml"),
    ("Share its Terraform state (--state s3://bucket/prefix), or let", "Let"),
    (
        "a task that needs it must ask for the permission full_internet",
        "machines that need it have `internet: full`, and a family's task the permission full_internet",
    ),
)
# A longer option that begins so is another one.
_OPTION = re.compile("|".join(rf"{re.escape(words)}(?![\w-])" for words, _ in _WORDS))
_REPLACED = dict(_WORDS)


def for_inspect(text: str) -> str:
    """Returns a message, or a hint, that names keys and arguments in the place of options. Safe to repeat."""
    parts = _COMMAND.split(text)
    parts[::2] = [_OPTION.sub(lambda found: _REPLACED[found[0]], part) for part in parts[::2]]
    return "".join(parts)
