"""Names the build step that brings a module which the primary machine's Python lacks."""

from __future__ import annotations

import json
import re

PAGE = "docs/reference/task-families.md#what-metrs-image-has-besides"

# What METR's image has in its Python and ours has not: module -> what pip installs, in the version of METR's image
# (METR/vivaria, task-standard/Dockerfile); without a version, what one of these needs.
OF_METRS_IMAGE = {
    "aiohttp": "aiohttp==3.8.4",
    "pdb_attach": "pdb_attach==3.0.0",
    "playwright": "playwright==1.46.0",
    "py_spy": "py-spy==0.3.14",
    "pydantic": "pydantic==1.10.8",
    "tiktoken": "tiktoken==0.4.0",
    "aiosignal": "aiosignal",
    "async_timeout": "async-timeout",
    "certifi": "certifi",
    "charset_normalizer": "charset-normalizer",
    "frozenlist": "frozenlist",
    "greenlet": "greenlet",
    "idna": "idna",
    "multidict": "multidict",
    "pyee": "pyee",
    "regex": "regex",
    "requests": "requests",
    "typing_extensions": "typing_extensions",
    "urllib3": "urllib3",
    "yarl": "yarl",
}
_MESSAGE = re.compile(r"No module named '(\w{1,80})[\w.]{0,200}'", re.ASCII)


def build_step(module: str) -> str:
    """Returns the build step that installs a module, as build_steps.json has it.

    Args:
        module: its name; the package's may be another one, unless METR's image has it.
    """
    package = OF_METRS_IMAGE.get(module, "<PACKAGE>")
    return json.dumps({"type": "shell", "commands": [f"pip install {package}"]})


def how_to_install(message: str) -> str | None:
    """Returns what to do about a ModuleNotFoundError; None if its message names no module.

    Args:
        message: the error's, from a machine.
    """
    match = _MESSAGE.fullmatch(message)
    if match is None:
        return None
    module = match[1]
    if module in OF_METRS_IMAGE:
        return (
            f"METR's image has {module}, and the machine's Python has not. Add this build step to build_steps.json: "
            f"{build_step(module)}. {PAGE} has the list."
        )
    return (
        f"The machine's Python has no module {module}. If pip installs it, add this build step to build_steps.json, "
        f"with the package's name: {build_step(module)}. It runs before the family's module is imported."
    )
