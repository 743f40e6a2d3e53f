"""Reads YAML that people write: safely, with each key allowed once, and with errors that name the line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from provisioner.base.errors import UsageError
from provisioner.base.validation import shown

# YAML's `<<` can double a mapping with every line of the file, so the size of a merge is bounded.
_MAXIMUM_MERGED_KEYS = 1000
_MAXIMUM_MERGED_MAPPINGS = 20


def read(path: Path, what: str, maximum_bytes: int, *, plain: bool = False) -> object:
    """Reads a YAML file that is no larger than it may be. Messages name it by its absolute path.

    Args:
        what: what it is, as the beginning of messages, such as "The suite file".
        maximum_bytes: more is refused, and never held in memory.
        plain: as for `load`.

    Raises:
        UsageError: it cannot be read, is too large, or is not YAML as for `load`.
    """
    title = f"{what} {path.absolute()}"
    try:
        with path.open("rb") as file:
            data = file.read(maximum_bytes + 1)
    except OSError as error:
        raise UsageError(f"{title} cannot be read: {error.strerror}.") from error
    if len(data) > maximum_bytes:
        raise UsageError(f"{title} is larger than {maximum_bytes >> 20} MiB.")
    return load(data, title, plain=plain)


def load(data: bytes, name: str, kind: type[UsageError] = UsageError, *, plain: bool = False) -> object:
    """Parses a YAML document.

    Args:
        data: the document; the caller must bound its size.
        name: the name that messages use for it.
        kind: the class of the error to raise.
        plain: whether `yes`, `22:22` and `2026-01-02` are text, as in YAML 1.2 and in Docker Compose.

    Raises:
        UsageError: the document is not YAML, repeats a key, or has a mapping or sequence that contains itself.
    """
    try:
        return yaml.load(data, _PlainLoader if plain else _Loader)  # noqa: S506 -- SafeLoaders
    except yaml.MarkedYAMLError as error:
        at = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = (error.problem or error.context or "no reason given")[:200]
        hint = "Text that begins with * or & needs quotes." if "alphabetic" in reason else None
        raise kind(f"{name} is not valid YAML{at}: {reason}.", hint=hint) from None
    except yaml.reader.ReaderError as error:
        if error.encoding == "unicode":
            raise kind(f"{name} has a character that YAML forbids: see character {error.position}.") from None
        raise kind(f"{name} is not UTF-8 text: see byte {error.position}.", hint="Save it as UTF-8.") from None
    except UnicodeError:
        raise kind(f"{name} is not UTF-8 text.", hint="Save it as UTF-8.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise kind(f"{name} cannot be read as YAML: {shown(str(error))}.") from None
    except RecursionError:
        raise kind(f"{name} is nested too deeply.") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but keys are taken as written (`1:` and `no:` are names) and must not repeat."""

    # types-PyYAML calls the anchor a dict; it is the anchor's name or None.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key {shown(key.value)} appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # Deep, so that what contains itself is refused.
        return super().construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value) for key, value in node.value}

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        for value in merges:
            if isinstance(value, yaml.SequenceNode) and len(value.value) > _MAXIMUM_MERGED_MAPPINGS:
                raise yaml.MarkedYAMLError(problem="a merge has too many mappings", problem_mark=value.start_mark)
        super().flatten_mapping(node)
        if merges and len(node.value) > _MAXIMUM_MERGED_KEYS:
            raise yaml.MarkedYAMLError(problem="a merge has too many keys", problem_mark=node.start_mark)


class _PlainLoader(_Loader):
    """Takes for text what YAML 1.1 alone takes for a truth value, a number of base 60 or a date."""


def _plain_bool(loader: _PlainLoader, node: yaml.ScalarNode) -> object:
    return loader.construct_yaml_bool(node) if node.value.lower() in ("true", "false") else node.value


def _plain_int(loader: _PlainLoader, node: yaml.ScalarNode) -> object:
    return node.value if ":" in node.value else loader.construct_yaml_int(node)


def _plain_float(loader: _PlainLoader, node: yaml.ScalarNode) -> object:
    return node.value if ":" in node.value else loader.construct_yaml_float(node)


def _untagged(loader: _PlainLoader, _tag: str, node: yaml.Node) -> object:
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    node.tag = loader.resolve(type(node), text, (True, False))  # type: ignore[no-untyped-call]
    del loader.recursive_objects[node]  # as it is constructed anew; PyYAML removes it at the end
    try:
        return loader.construct_object(node)
    finally:
        loader.recursive_objects[node] = None


_PlainLoader.add_constructor("tag:yaml.org,2002:bool", _plain_bool)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _plain_int)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _plain_float)
_PlainLoader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)
# Compose's own tags, such as `!override`, only matter when files are merged.
_PlainLoader.add_multi_constructor("!", _untagged)
