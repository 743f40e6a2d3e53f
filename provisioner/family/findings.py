"""Finds mistakes in a family before anything is built, from its text alone. Never imports or runs its code.

Only what is certain is an error: what a family does with names that it computes is left to the machine.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from provisioner.base.models import FileBuildStep
from provisioner.base.printable import beginning, printable
from provisioner.base.validation import shown
from provisioner.family.build_steps import PIP_STEP
from provisioner.family.env_file import AUX_VM_VARIABLES
from provisioner.family.files import matching
from provisioner.family.loader import TaskFamily
from provisioner.family.manifest import FILE_NAMES
from provisioner.family.setup_data import closest
from provisioner.family.source import ATTRIBUTES, FUNCTIONS, FamilySource, FunctionNode, kind_of, strings

Level = Literal["error", "warning"]
Rule = Literal[
    "invalid-file",
    "unknown-task",
    "unknown-manifest-task",
    "unmatched-glob",
    "missing-variable",
    "empty-variable",
    "wrong-parameters",
    "async-method",
    "misspelt-name",
    "missing-instructions",
    "no-score",
    "import-before-install",
    "secret-in-file",
    "not-checked",
]

RULES_PAGE = "docs/reference/family-checks.md"
MAXIMUM_FINDINGS = 100
MAXIMUM_CHARACTERS = 2000


@dataclass(frozen=True)
class Finding:
    """One mistake. Texts are printable and bounded, whatever the family says.

    Args:
        level: an error, with which the family surely fails; or a warning.
        rule: the name of what was checked; RULES_PAGE has a section for each.
        file: the file, relative to the family's directory; empty for the family as a whole.
        line: the line in the file, or None.
        what: what is wrong.
        why: why it matters.
        fix: what to do.
    """

    level: Level
    rule: Rule
    file: str
    line: int | None
    what: str
    why: str
    fix: str

    def __post_init__(self) -> None:
        """Makes the texts printable."""
        for name in ("file", "what", "why", "fix"):
            object.__setattr__(self, name, printable(beginning(getattr(self, name), MAXIMUM_CHARACTERS)))

    @property
    def place(self) -> str:
        """Returns FILE:LINE, as far as it is known."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    @property
    def see(self) -> str:
        """Returns the section of the documentation that explains the rule."""
        return f"{RULES_PAGE}#{self.rule}"


def bounded(findings: list[Finding]) -> list[Finding]:
    """Sorts findings, errors first and then by place, and leaves out those beyond MAXIMUM_FINDINGS."""
    found = sorted(set(findings), key=lambda each: (each.level != "error", each.file, each.line or 0, each.rule))
    if len(found) <= MAXIMUM_FINDINGS:
        return found
    left_out = len(found) - MAXIMUM_FINDINGS
    return [
        *found[:MAXIMUM_FINDINGS],
        Finding("warning", "not-checked", "", None, f"{left_out} more findings are not shown.", "They are too many.",
                "Mend those that are shown, and check again."),
    ]  # fmt: skip


# What the primary machine's Python has, beside its standard library (base_image/python/packages.txt).
INSTALLED = frozenset(
    {"metr_task_standard", "pip", "setuptools", "pkg_resources", "wheel", "pytest", "_pytest", "pluggy", "iniconfig",
     "packaging", "attr", "attrs"}
)  # fmt: skip
# Modules that Python 3.12 and 3.13 no longer have, but the machine's Python 3.11 does.
_OF_PYTHON_311 = frozenset(
    {"aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp",
     "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau",
     "telnetlib", "uu", "xdrlib"}
)  # fmt: skip


def import_findings(source: FamilySource, family: TaskFamily) -> Iterator[Finding]:
    """Yields imports at the top of the module of what the machine does not have before install() has run."""
    own = {part.partition(".")[0] for name in family.files for part in PurePosixPath(name).parts}
    own |= {PurePosixPath(step.destination).stem for step in family.build_steps if isinstance(step, FileBuildStep)}
    present = own | sys.stdlib_module_names | _OF_PYTHON_311 | INSTALLED
    # Steps run before the first import, and a command may install any module.
    may_be_installed = any(not isinstance(step, FileBuildStep) for step in family.build_steps)
    globs = family.manifest.install_inputs
    seen = family.files if globs is None else {*matching(globs, family.files), family.module.name}
    for statement in source.tree.body:
        for name in _imported(statement):
            files = {f"{name}.py", f"{name}/__init__.py"} & set(family.files)
            if files and files.isdisjoint(seen):
                yield Finding(
                    "error", "import-before-install", source.file, statement.lineno,
                    f"The module imports {shown(name)} at its top, and install_inputs leaves {min(files)} out.",
                    "install() belongs to this module, and so does not run without it.",
                    f"Add {shown(min(files))} to install_inputs, or import it inside the functions that use it.",
                )  # fmt: skip
            elif name not in present and not may_be_installed:
                yield Finding(
                    "warning", "import-before-install", source.file, statement.lineno,
                    f"The module imports {shown(name)} at its top.",
                    "The machine's Python has no such module, and install() belongs to this module, so it cannot run "
                    "before the import.",
                    "Import it inside the functions that use it, or install it by a step in build_steps.json: "
                    f"{PIP_STEP}.",
                )  # fmt: skip


def glob_findings(family: TaskFamily) -> Iterator[Finding]:
    """Yields globs of install_inputs that match no file."""
    manifest = next((name for name in FILE_NAMES if name in family.files), "")
    for glob in family.manifest.install_inputs or ():
        if not matching([glob], family.files):
            yield Finding(
                "warning", "unmatched-glob", manifest, None,
                f"install_inputs has {shown(glob)}, which matches no file.",
                "install() sees none of the files that it may have been meant for.",
                "Correct or remove it. `dir/**` is all that lies below a directory.",
            )  # fmt: skip


def _imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []


_ARGUMENTS = ("no argument", "the task", "the task and the submission")
_AGGREGATE_ARGUMENTS = "the task and the score log"
_PARAMETERS = {0: "", 1: "t", 2: "t, submission"}
# An environment comes to a result without them, or whatever they do.
_HARMLESS = frozenset({"teardown"})
# Their results are not looked at: what never runs is missed only later.
_WITHOUT_RESULT = frozenset({"install", "start", "teardown"})
_ALIKE = 0.8
# Comparing names takes long.
_MAXIMUM_MEMBERS = 500


def method_findings(source: FamilySource) -> Iterator[Finding]:
    """Yields what is wrong with the functions' signatures and names, and what is missing."""
    for name, count in FUNCTIONS.items():
        if function := source.function(name):
            yield from _signature(source, function, count)
    yield from _misspelt(source)
    yield from _missing(source)


def _signature(source: FamilySource, function: FunctionNode, count: int) -> Iterator[Finding]:
    name = function.name
    given = count + (kind_of(function) == "class")
    parameters = _PARAMETERS[count] if name != "aggregate_scores" else "t, score_log"
    if not _takes(function.args, given) and not (name == "teardown" and _takes(function.args, given - 1)):
        arguments = _AGGREGATE_ARGUMENTS if name == "aggregate_scores" else _ARGUMENTS[count]
        yield Finding(
            _level(source, name), "wrong-parameters", source.file, function.lineno,
            f"{name}({_shown(function.args)}) cannot be called with {arguments}.",
            f"provisioner calls TaskFamily.{name}({parameters}), on the class.",
            f"Write @staticmethod and def {name}({parameters}).",
        )  # fmt: skip
    if isinstance(function, ast.AsyncFunctionDef):
        yield Finding(
            "warning" if name in _WITHOUT_RESULT else _level(source, name), "async-method", source.file,
            function.lineno, f"{name} is async.", "Nothing awaits it, so its body never runs.",
            f"Write def {name}, and asyncio.run(...) inside where something has to be awaited.",
        )  # fmt: skip


def _level(source: FamilySource, name: str) -> Level:
    """Returns how bad it is if a function fails: score() is not called where aggregate_scores() decides."""
    unused = name in _HARMLESS or (name == "score" and not source.lacks("aggregate_scores"))
    return "warning" if unused else "error"


def _takes(parameters: ast.arguments, count: int) -> bool:
    """Returns whether a function can be called with `count` positional arguments."""
    positional = [*parameters.posonlyargs, *parameters.args]
    required = len(positional) - len(parameters.defaults)
    keywords = any(default is None for default in parameters.kw_defaults)
    return required <= count and (count <= len(positional) or parameters.vararg is not None) and not keywords


def _shown(parameters: ast.arguments) -> str:
    # Not by ast.unparse(): a default value may be nested too deep for it.
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    names += [f"*{parameters.vararg.arg}"] if parameters.vararg else []
    names += [f"{each.arg}=" for each in parameters.kwonlyargs]
    return ", ".join([*names, *([f"**{parameters.kwarg.arg}"] if parameters.kwarg else [])])


def _misspelt(source: FamilySource) -> Iterator[Finding]:
    known = [*FUNCTIONS, *ATTRIBUTES]
    if len(source.members) > _MAXIMUM_MEMBERS:
        return
    for name in sorted(source.members.keys() - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE) if len(name) < 64 else []
        if near and source.lacks(near[0]) and not name.startswith("_"):
            yield Finding(
                "warning", "misspelt-name", source.file, source.members[name][0].lineno,
                f"{name} looks like {near[0]}, which the class does not have.",
                "The Task Standard knows no such name, so provisioner never looks at it.",
                f"Call it {near[0]}, or, if it is another thing, give it a name that begins with _.",
            )  # fmt: skip


def _missing(source: FamilySource) -> Iterator[Finding]:
    line = source.definition.lineno if source.definition else None
    if source.lacks("get_instructions"):
        yield Finding(
            "warning", "missing-instructions", source.file, line, "The class has no get_instructions.",
            "The agent's instructions.txt will be empty.", "Add get_instructions(t), which returns a string.",
        )  # fmt: skip
    if source.lacks("score") and source.lacks("aggregate_scores"):
        yield Finding(
            "warning", "no-score", source.file, line, "The class has neither score nor aggregate_scores.",
            "A run ends as not_scored. Intermediate scores alone are no end score.",
            "Add score(t, submission); or aggregate_scores(t, score_log), with intermediate_score.",
        )  # fmt: skip
    elif source.lacks("score") and source.lacks("intermediate_score"):
        yield Finding(
            "warning", "no-score", source.file, line, "The class has aggregate_scores, but no intermediate_score.",
            "There is never anything to aggregate: the score log stays empty.", "Add intermediate_score(t).",
        )  # fmt: skip


_VARIABLES = "required_environment_variables"
_SHOWN = 20


def task_names(source: FamilySource) -> tuple[str, ...] | None:
    """Returns the names of the tasks, or None if get_tasks does more than to return a dict of literal names."""
    value = source.returned("get_tasks")
    if not isinstance(value, ast.Dict):
        return None
    names = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return tuple(dict.fromkeys(names)) if names and len(names) == len(value.keys) else None


def required_variables(source: FamilySource) -> list[str]:
    """Returns the variables that the family certainly requires of the env file."""
    ours: tuple[str, ...] = () if source.lacks("get_aux_vm_spec") else AUX_VM_VARIABLES
    names = strings(source.attribute(_VARIABLES)) or ()
    return [name for name in dict.fromkeys(names) if name not in ours]


def task_findings(source: FamilySource, family: TaskFamily, task: str | None) -> Iterator[Finding]:
    """Yields tasks that get_tasks does not have: of the manifest, and the one that is to run."""
    tasks = task_names(source)
    if tasks is None:
        return
    known = set(tasks)
    manifest = next((name for name in FILE_NAMES if name in family.files), "")
    unknown = [name for name in family.manifest.tasks if name not in known]
    for name in unknown[:_SHOWN]:
        yield Finding(
            "warning", "unknown-manifest-task", manifest, _line_of_key(family.directory / manifest, name),
            f"The manifest names the task {shown(name)}, which get_tasks does not have.",
            "Its resources and scoring are for no task.",
            f"Remove it, or correct its name. get_tasks has {_listed(tasks)}.",
        )  # fmt: skip
    if task is not None and task not in known:
        function = source.function("get_tasks")
        yield Finding(
            "error", "unknown-task", source.file, function.lineno if function else None,
            f"The family {family.name} has no task {shown(task)}.", "No environment can be created for it.",
            f"The nearest of its tasks are {_listed(closest(task, tasks))}.",
        )  # fmt: skip


def variable_findings(source: FamilySource, variables: Mapping[str, str] | None) -> Iterator[Finding]:
    """Yields required variables that are missing or empty.

    Args:
        variables: those of the env file; None if it is not known which will be given.
    """
    required = required_variables(source)
    if variables is None or not required:
        return
    value = source.attribute(_VARIABLES)
    line = value.lineno if value else None
    if missing := [name for name in required if name not in variables]:
        yield Finding(
            "error", "missing-variable", source.file, line,
            f"The following required environment variables are not set: {', '.join(missing[:_SHOWN])}.",
            "No task of the family can start without them.",
            "Add them as NAME=value lines to the env file.",
        )  # fmt: skip
    if empty := [name for name in required if variables.get(name) == ""]:
        yield Finding(
            "warning", "empty-variable", source.file, line,
            f"The env file leaves required environment variables empty: {', '.join(empty[:_SHOWN])}.",
            "They count as set, and the family gets an empty text.", "Write their values after the =.",
        )  # fmt: skip


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(shown, list(names)[:_SHOWN])) + more


def _line_of_key(path: Path, key: str) -> int | None:
    """Returns the first line of a YAML file that begins like a key. The file has been read and is short."""
    beginning = re.compile(rf"\s*(['\"]?){re.escape(key)}\1\s*:")
    lines = path.read_text(errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, start=1) if beginning.match(line)), None)


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
    "Remove the secret from the file, pass it in the env file, and list its variable in "
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
