"""Everything that strangers can get wrong: each bad input has its own clear message and exit code 2."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError, UsageError
from provisioner.base.models import MachineSize, TaskSetup
from provisioner.clouds.local.sizing import check_machine_fits
from provisioner.clouds.sizing import size_of_aux_vm
from provisioner.environment.allowlist import parse_destination
from provisioner.family.build_steps import check_build_steps, parse_build_steps
from provisioner.family.env_file import check_required, load_env_file
from provisioner.family.loader import load_family
from provisioner.family.manifest import parse_manifest
from provisioner.family.setup_data import parse_setup_data, parse_vm_spec, require_task

GOOD_MODULE = "class TaskFamily:\n    @staticmethod\n    def get_tasks():\n        return {}\n"
NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Bad:
    """A bad input: its name, what reads it (given an empty directory), and what its message must say."""

    name: str
    read: Callable[[Path], object]
    says: str


@dataclass(frozen=True)
class Family:
    """Writes a family called `family`, with a good module unless told otherwise, and loads it."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    name: str = "family"
    prepare: Callable[[Path], object] | None = None

    def __call__(self, directory: Path) -> object:
        root = directory / self.name
        root.mkdir()
        (directory / "family_evil").mkdir()
        (directory / "family_evil" / "secret").write_text("secret")
        for name, text in {f"{self.name}.py": GOOD_MODULE, **self.files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        for name, target in self.links.items():
            (root / name).symlink_to(target)
        if self.prepare:
            self.prepare(root)
        return load_family(root)


def steps(*values: object) -> Family:
    return Family({"build_steps.json": json.dumps(values), "assets/file": "x"})


def file_step(source: object) -> dict[str, object]:
    return {"type": "file", "source": source, "destination": "there"}


def manifest(text: str) -> Callable[[Path], object]:
    return lambda _: parse_manifest(text.encode())


def task(**keys: object) -> Callable[[Path], object]:
    return lambda _: parse_setup_data({"tasks": {"main": keys}})


def spec(**keys: object) -> Callable[[Path], object]:
    good = {"cpu_count_range": [1, 2], "ram_gib_range": [1, 2]}
    return lambda _: size_of_aux_vm(parse_vm_spec({**good, **keys}, "spec"))


def local(**keys: object) -> Callable[[Path], object]:
    good = {"cpu_count_range": [1, 2], "ram_gib_range": [1, 2]}

    def check(_: Path) -> None:
        parsed = parse_vm_spec({**good, **keys}, "spec")
        check_machine_fits(size_of_aux_vm(parsed), host_memory_gib=8, host_cpus=2, spec=parsed)

    return check


def env(text: str | bytes) -> Callable[[Path], object]:
    def read(directory: Path) -> object:
        path = directory / "env"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_env_file(path)

    return read


def allow(text: str) -> Callable[[Path], object]:
    return lambda _: parse_destination(text)


def listen(root: Path) -> None:
    # Relative, since a socket's path may have 107 bytes at most.
    here = Path.cwd()
    os.chdir(root)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("s")
    finally:
        os.chdir(here)


def no_class(text: str) -> Family:
    return Family({"family.py": text})


SETUP = parse_setup_data({"tasks": {"find_flag": {}, "find_flag_hard": {}, "count": {}}})
GPU = {"count_range": [1, 1], "model": "h100"}

FAMILIES = [
    Bad("no such directory", lambda path: load_family(path / "nowhere"), "nowhere does not exist"),
    Bad("a file", lambda path: load_family(Path(__file__)), "is not a directory"),
    Bad("a name with capitals", Family(name="My_Family"), "'My_Family' is not a valid family name"),
    Bad("a name with shell syntax", Family(name="a;reboot"), "'a;reboot' is not a valid family name"),
    Bad("a name with HCL syntax", Family(name='${file("x")}'.replace("/", "")), "is not a valid family name"),
    Bad("a name with Jinja syntax", Family(name="{{ 7 * 7 }}"), "'{{ 7 * 7 }}' is not a valid family name"),
    Bad("a long name", Family(name="a" * 65), "has over 64 characters"),
    Bad("no module", Family(prepare=lambda root: (root / "family.py").unlink()), "has no family.py"),
    Bad("a syntax error", no_class("class TaskFamily:\n    def\n"), "is not valid Python: invalid syntax (line 2)"),
    Bad("NUL in the module", no_class("a = 1\0"), "family.py"),
    Bad("a module nested too deeply", no_class("(" * 100_000), "too many nested parentheses"),
    Bad("a module that is too large", no_class("#" * (4 << 20) + "\n"), "family.py is larger than"),
    Bad("no class", no_class("class Family: pass"), "has no class TaskFamily"),
    Bad("no get_tasks", no_class("class TaskFamily:\n    def start(t): pass"), "(line 1) has no get_tasks"),
    Bad(
        "score and aggregate_scores",
        no_class(GOOD_MODULE + "    def score(t, s): pass\n    def aggregate_scores(t, l): pass"),
        "both score and aggregate_scores",
    ),
    Bad("a link out", Family(links={"out": "../family_evil/secret"}), "'out' leads out of the family directory, to"),
    Bad("a link out and back in", Family(links={"back": "../family/family.py"}), "'back' leads out of"),
    Bad("an absolute link", Family(links={"hosts": "/etc/hosts"}), "'hosts' is absolute"),
    Bad("a circle of links", Family(links={"a": "b", "b": "a"}), "leads in a circle"),
    Bad("a fifo", Family(prepare=lambda root: os.mkfifo(root / "pipe")), "'pipe' is a fifo"),
    Bad("a socket", Family(prepare=listen), "'s' is a socket"),
    Bad(
        "a file name that is not UTF-8",
        Family(prepare=lambda root: Path(os.fsdecode(os.fsencode(root) + b"/\xff")).touch()),
        "is not UTF-8",
    ),
]

BUILD_STEPS = [
    Bad("not JSON", Family({"build_steps.json": '[{"type": '}), "read: it is not JSON: Expecting value: line 1"),
    Bad("nested too deeply", Family({"build_steps.json": "[" * 100_000}), "read: it is nested more than 100 deep"),
    Bad("an object", Family({"build_steps.json": "{}"}), "must be a list of build steps, not a mapping"),
    Bad("a directory", Family({"build_steps.json/x": ""}), "build_steps.json is not a file"),
    Bad("a string as a step", steps("ls"), "step 1 must be an object, not 'ls'"),
    Bad("another type", steps({"type": "docker"}), 'type must be "shell" or "file", not \'docker\''),
    Bad("no type", steps({"commands": []}), 'type must be "shell" or "file", not null'),
    Bad("an unknown key", steps({"type": "shell", "commands": [], "user": "root"}), "unknown key 'user' in a shell"),
    Bad("no commands", steps({"type": "shell"}), "a shell step needs commands"),
    Bad("commands as a string", steps({"type": "shell", "commands": "ls"}), "commands must be a list of strings"),
    Bad("a number as a command", steps({"type": "shell", "commands": ["ls", 1]}), "command 2 must be a string, not 1"),
    Bad("NUL in a command", steps({"type": "shell", "commands": ["\0"]}), "command 1 contains a character"),
    Bad("no destination", steps({"type": "file", "source": "assets"}), "a file step needs destination"),
    Bad("an empty source", steps(file_step("")), "source must be a path, not ''"),
    Bad("NUL in a source", steps(file_step("a\0b")), "source contains a character"),
    Bad("an absolute source", steps(file_step("/etc/passwd")), "source '/etc/passwd' is absolute"),
    Bad("a missing source", steps(file_step("assets/none")), "source 'assets/none' does not exist"),
    Bad("a source above", steps(file_step("..")), "source '..' leads out"),
    Bad("a sibling's source", steps(file_step("../family_evil/secret")), "source '../family_evil/secret' leads out"),
    Bad("a source missing outside", steps(file_step("../none/x")), "source '../none/x' leads out"),
    Bad(
        "a source that is never copied",
        Family({"build_steps.json": json.dumps([file_step(".git/config")]), ".git/config": ""}),
        "source '.git/config' is not copied",
    ),
    Bad("over a thousand steps", lambda _: parse_build_steps([{}] * 1001, "steps"), "has 1001 build steps"),
    Bad(
        "an aux VM's source that is missing",
        lambda path: check_build_steps(parse_build_steps([file_step("${path}")], "aux"), path, "aux"),
        "aux, step 1: source '${path}' does not exist",
    ),
]

MANIFESTS = [
    Bad("both names", Family({"manifest.yaml": "tasks: {}", "manifest.yml": "tasks: {}"}), "both manifest.yaml and"),
    Bad("a manifest that is a directory", Family({"manifest.yaml/x": ""}), "manifest.yaml is not a file"),
    Bad("not YAML", manifest("tasks: [\n"), "not valid YAML in line 2"),
    Bad("a list", manifest("- tasks"), "must be a mapping with the key `tasks`"),
    Bad("no tasks", manifest("version: '1'"), "- tasks: is required"),
    Bad("a key twice", manifest("tasks: {}\ntasks: {}"), "in line 2: the key 'tasks' appears twice"),
    Bad("a key that is a list", manifest("tasks: {[a]: {}}"), "a key must be a plain name"),
    Bad("a Python tag", manifest("tasks: !!python/object/apply:os.system [ls]"), "could not determine a constructor"),
    Bad("a mapping in itself", manifest("tasks: &a {meta: *a}"), "found unconstructable recursive node"),
    Bad("a merge that explodes", manifest(f"a: &a {{x: 1}}\ntasks: {{<<: [{', '.join(['*a'] * 30)}]}}"), "too many ma"),
    Bad("an invalid date", manifest("tasks: {}\nmeta: 2024-13-45"), "cannot be read as YAML: 'month must be"),
    Bad("deep nesting", manifest("tasks: " + "[" * 5000), "manifest.yaml is nested too deeply"),
    Bad("too large", manifest("#" * (1 << 20) + "\n"), "manifest.yaml is larger than"),
    Bad("an unknown key", manifest("tasks: {}\nowner: me"), "- owner: unknown key"),
    Bad("an unknown task key", manifest("tasks: {main: {cpus: 1}}"), "- tasks.main.cpus: unknown key"),
    Bad(
        "a key like a known one",
        manifest("tasks: {main: {resources: {memory: 2}}}"),
        "- tasks.main.resources.memory: unknown key; perhaps memory_gb?",
    ),
    Bad("an unknown resource", manifest("tasks: {main: {resources: {ram: 1}}}"), "resources.ram: unknown key"),
    Bad("a version that is a number", manifest("version: 1.0\ntasks: {}"), "- version: must be a string, not 1.0"),
    Bad("true as cpus", manifest("tasks: {a: {resources: {cpus: true}}}"), "cpus: must be a number, not true"),
    Bad("text as memory", manifest("tasks: {a: {resources: {memory_gb: 4GB}}}"), "must be a number, not '4GB'"),
    Bad("no memory", manifest("tasks: {a: {resources: {memory_gb: 0}}}"), "memory_gb: must be more than 0, not 0"),
    Bad("negative storage", manifest("tasks: {a: {resources: {storage_gb: -1}}}"), "storage_gb: must be more than 0"),
    Bad("infinite cpus", manifest("tasks: {a: {resources: {cpus: .inf}}}"), "cpus: must be a finite number, not inf"),
    Bad(
        "a reversed GPU range",
        manifest("tasks: {a: {resources: {gpu: {count_range: [2, 1], model: a10}}}}"),
        "gpu.count_range: must be [low, high] with 0 < low <= high, not [2, 1]",
    ),
    Bad("a key with HCL syntax", manifest("tasks: {}\n'${x}': 1"), "- '${x}': unknown key"),
    Bad("text as a flag", manifest("tasks: {a: {scoring: {visible_to_agent: 'no'}}}"), "must be true or false, not"),
]

VM_SPECS = [
    Bad("not an object", lambda _: parse_vm_spec([1], "spec"), "spec must be an object, not a list of 1"),
    Bad("no ranges", lambda _: parse_vm_spec({}, "spec"), "spec lacks cpu_count_range, ram_gib_range"),
    Bad("an unknown key", spec(user_data="#!/bin/sh"), "spec has the unknown key 'user_data'"),
    Bad("a number as a range", spec(cpu_count_range=2), "cpu_count_range must be a pair [low, high], not 2"),
    Bad("three numbers", spec(ram_gib_range=[1, 2, 3]), "ram_gib_range must be a pair [low, high], not a list of 3"),
    Bad("a reversed CPU range", spec(cpu_count_range=[4, 2]), "cpu_count_range is reversed: 4 is more than 2"),
    Bad("a reversed memory range", spec(ram_gib_range=[8, 0.5]), "ram_gib_range is reversed: 8 is more than 0.5"),
    Bad("no CPU", spec(cpu_count_range=[0, 2]), "cpu_count_range must hold numbers above 0, not 0"),
    Bad("negative memory", spec(ram_gib_range=[-1, 2]), "ram_gib_range must hold numbers above 0, not -1"),
    Bad("NaN CPUs", spec(cpu_count_range=[NAN, 2]), "cpu_count_range must hold finite numbers, not nan"),
    Bad("infinite memory", spec(ram_gib_range=[1, INFINITY]), "ram_gib_range must hold finite numbers, not inf"),
    Bad("memory that no float holds", spec(ram_gib_range=[10**400, 10**400]), "ram_gib_range must hold finite numbers"),
    Bad("true CPUs", spec(cpu_count_range=[True, 2]), "cpu_count_range must hold numbers, not true"),
    Bad("memory as text", spec(ram_gib_range=["1", "2"]), "ram_gib_range must hold numbers, not '1'"),
    Bad("an unknown architecture", spec(cpu_architecture="riscv"), "must be one of x64, arm64, not 'riscv'"),
    Bad("an unknown image", spec(base_image_type="alpine"), "ubuntu-20.04-cuda, not 'alpine'"),
    Bad("CUDA without a GPU", spec(base_image_type="ubuntu-20.04-cuda"), "ubuntu-20.04-cuda needs a gpu_spec"),
    Bad("a GPU without a model", spec(gpu_spec={"count_range": [1, 1]}), "spec.gpu_spec lacks model"),
    Bad("half a GPU", spec(gpu_spec={**GPU, "count_range": [0.5, 1]}), "must hold whole numbers, not 0.5 and 1"),
    Bad("a GPU model that is a number", spec(gpu_spec={**GPU, "model": 100}), "must be the name of a GPU, not 100"),
    Bad("bad build steps", spec(build_steps=[{"type": "ansible"}]), "spec.build_steps, step 1: type must be"),
    Bad("no whole CPU", spec(cpu_count_range=[1.2, 1.8]), "No whole number of vCPUs lies between 1.2 and 1.8"),
    Bad("half a CPU at most", spec(cpu_count_range=[0.1, 0.5]), "No whole number of vCPUs lies between 0.1 and 0.5"),
    Bad("too little memory to boot", spec(ram_gib_range=[0.1, 0.3]), "may have at most 0.3 GiB of memory"),
    Bad("no whole MiB", spec(ram_gib_range=[1.0001, 1.0002]), "No whole number of MiB lies between"),
    Bad("a GPU, locally", local(gpu_spec=GPU), "The aux VM asks for a GPU"),
    Bad("ARM, locally", local(cpu_architecture="arm64"), "asks for an arm64 CPU, and this host's is x64"),
    Bad("more memory than the host's", local(ram_gib_range=[9, 16]), "asks for 9 GiB of memory, and this host has"),
    Bad("too many CPUs", local(cpu_count_range=[64, 96]), "asks for 64 vCPUs, and this host can provide at most 32"),
    Bad(
        "a GPU for the primary machine, locally",
        lambda _: check_machine_fits(MachineSize(cpus=1, memory_gib=1, disk_gib=16), host_memory_gib=8, gpu=True),
        "The primary machine asks for a GPU",
    ),
]

SETUP_DATA = [
    Bad("nothing", lambda _: parse_setup_data(None), "setup data must be an object, not null"),
    Bad("text", lambda _: parse_setup_data("x" * 10_000_000), "setup data must be an object, not 'xxx"),
    Bad("an unknown key", lambda _: parse_setup_data({"tasks": {}, "rce": 1}), "setup data has the unknown key 'rce'"),
    Bad("no tasks", lambda _: parse_setup_data({"tasks": {}}), "The family has no tasks"),
    Bad("tasks as a list", lambda _: parse_setup_data({"tasks": ["a"]}), "tasks must be an object of names and tasks"),
    Bad(
        "too many tasks",
        lambda _: parse_setup_data({"tasks": dict.fromkeys(map(str, range(10_001)))}),
        "has 10001 tasks",
    ),
    Bad("a task that is text", lambda _: parse_setup_data({"tasks": {"a": "b"}}), "Task 'a' must be an object, not"),
    Bad("an empty name", lambda _: parse_setup_data({"tasks": {" ": {}}}), "A task's name is empty"),
    Bad("a long task name", lambda _: parse_setup_data({"tasks": {"n" * 257: {}}}), "has over 256 characters"),
    Bad(
        "a name of two lines",
        lambda _: parse_setup_data({"tasks": {"a\nb": {}}}),
        r"'a\nb' contains control characters",
    ),
    Bad("a name with an escape", lambda _: parse_setup_data({"tasks": {"\x1b[2J": {}}}), r"'\x1b[2J' contains control"),
    Bad("a name with half a character", lambda _: parse_setup_data({"tasks": {"\ud800": {}}}), r"'\ud800' contains"),
    Bad("a name that is a number", lambda _: parse_setup_data({"tasks": {1: {}}}), "A task's name must be a string"),
    Bad("an unknown key of a task", task(score=1), "Task 'main' has the unknown key 'score'"),
    Bad("an unknown permission", task(permissions=["internet"]), "exactly [] or [\"full_internet\"], not ['internet']"),
    Bad("a permission as text", task(permissions="full_internet"), "[\"full_internet\"], not 'full_internet'"),
    Bad("a permission twice", task(permissions=["full_internet"] * 2), "not ['full_internet', 'full_internet']"),
    Bad("instructions as a list", task(instructions=["do"]), "instructions must be a string, not a list of 1"),
    Bad("huge instructions", task(instructions="é" * (1 << 19) + "x"), "instructions are larger than 1048576 bytes"),
    Bad("half a character", task(instructions="\udc80"), "instructions contain a lone surrogate"),
    Bad("variables as text", task(required_environment_variables="KEY"), "must be a list of names, not 'KEY'"),
    Bad("shell syntax in a variable", task(required_environment_variables=["A;reboot"]), "'A;reboot' is not the name"),
    Bad("a flag that is text", lambda _: parse_setup_data({"tasks": {}, "has_score": "yes"}), "has_score must be"),
    Bad(
        "two ways to score",
        lambda _: parse_setup_data({"tasks": {}, "has_score": True, "has_aggregate_scores": True}),
        "both score and aggregate_scores",
    ),
    Bad("warnings as text", lambda _: parse_setup_data({"tasks": {"a": {}}, "warnings": "w"}), "warnings must be a"),
    Bad("a task's warnings as text", task(warnings="w"), "Task 'main': warnings must be a list of at most 2"),
    Bad("a task's many warnings", task(warnings=["w"] * 3), "Task 'main': warnings must be a list of at most 2"),
    Bad("a task's warning that is no text", task(warnings=[1]), "Task 'main': every warning must be a string"),
    Bad("a spec inside setup data", task(aux_vm_spec={"cpus": 1}), "aux_vm_spec has the unknown key 'cpus'"),
    Bad("an unknown task", lambda _: require_task(SETUP, "f", "find_flg"), "no task 'find_flg'. The nearest names"),
    Bad("an unknown task with shell syntax", lambda _: require_task(SETUP, "f", "$(id)"), "no task '$(id)'"),
]

VARIABLES = [
    Bad(
        "missing variables",
        lambda _: check_required({"B": "x"}, TaskSetup(required_environment_variables=("C", "B", "A"))),
        "not set: A, C",
    ),
    Bad(
        "an aux VM's variable without an aux VM",
        lambda _: check_required({}, TaskSetup(required_environment_variables=("VM_IP_ADDRESS",))),
        "are not set: VM_IP_ADDRESS",
    ),
    Bad("no env file", lambda path: load_env_file(path / "none"), "cannot be read: No such file or directory"),
    Bad("an env file that is a directory", lambda path: load_env_file(path), "cannot be read: Is a directory"),
    Bad("bytes", env(b"A=\xff"), "is not UTF-8 text: see byte 2"),
    Bad("too large", env("A=" + "x" * (1 << 20)), "is larger than 1048576 bytes"),
    Bad("a name alone", env("\n# c\n\nKEY\n"), "line 4: the variable has no value"),
    Bad("an open quote", env("A=1\nB='x\n"), "line 2: not a line of the form NAME=value"),
    Bad("a bad name", env("my-key=1\n"), "line 1: a variable's name must be"),
    Bad("NUL in a value", env("A=x\0y\n"), "the value of A contains a NUL"),
    Bad("a value too long for a process", env("A=" + "x" * (128 << 10)), "the value of A must be shorter than 131072"),
]

DESTINATIONS = [
    Bad("no port", allow("example.com"), "'example.com' must have the form"),
    Bad("port 0", allow("example.com:0"), "'example.com:0': the port must be"),
    Bad("a port that is too large", allow("example.com:65536"), "'example.com:65536': the port must be"),
    Bad("a port in Arabic digits", allow("example.com:٤٤٣"), "the port must be a number"),
    Bad("IPv6", allow("[::1]:443"), "is IPv6"),
    Bad("all the internet", allow("0.0.0.0/0:443"), "is the whole internet"),
    Bad("half of the internet", allow("0.0.0.0/1:443"), "'0.0.0.0/1:443' reaches 127.0.0.0/8"),
    Bad("loopback", allow("127.0.0.1:80"), "'127.0.0.1:80' reaches 127.0.0.0/8 (loopback"),
    Bad("metadata", allow("169.254.169.254:80"), "reaches 169.254.0.0/16 (link-local"),
    Bad("multicast", allow("224.0.0.0/8:80"), "reaches 224.0.0.0/4 (multicast)"),
    Bad("bits beside the prefix", allow("10.0.0.1/8:80"), "has host bits set"),
    Bad("five numbers", allow("1.2.3.4.5:80"), "Expected 4 octets"),
    Bad("shell syntax in a host", allow("$(id).com:80"), "'$(id).com' is neither a host name nor"),
    Bad("HCL syntax in a host", allow("${x}:80"), "'${x}' is neither a host name nor"),
]

TABLE = {
    f"{group}: {bad.name}": bad
    for group, rows in {
        "family": FAMILIES,
        "build steps": BUILD_STEPS,
        "manifest": MANIFESTS,
        "VM spec": VM_SPECS,
        "setup data": SETUP_DATA,
        "variables": VARIABLES,
        "destination": DESTINATIONS,
    }.items()
    for bad in rows
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_has_its_own_message_and_exit_code_2(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        TABLE[name].read(tmp_path)
    assert TABLE[name].says in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable() or "\n  - " in caught.value.message
    assert len(caught.value.message) < 1000


def test_no_two_bad_inputs_have_the_same_message(tmp_path: Path) -> None:
    messages: dict[str, str] = {}
    for number, (name, bad) in enumerate(TABLE.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(UsageError) as caught:
            bad.read(directory)
        # The family's own directory is no part of what tells two messages apart.
        messages[name] = caught.value.message.replace(str(directory), "")
    same = {one for one in messages for other in messages if one != other and messages[one] == messages[other]}
    assert same == set()


def test_a_nested_link_to_a_sibling_is_refused(tmp_path: Path) -> None:
    family = tmp_path / "family"
    (family / "assets" / "deep").mkdir(parents=True)
    (tmp_path / "family_evil").mkdir()
    (family / "assets" / "deep" / "link").symlink_to("../../../family_evil")
    copied = parse_build_steps([file_step("assets")], "aux")
    with pytest.raises(TaskFamilyError, match=r"'assets/deep/link' leads out of the family directory"):
        check_build_steps(copied, family)


HOSTILE = [
    "$(reboot)",
    "`id`",
    "; rm -rf /",
    '${file("/etc/passwd")}',
    "%{ for x in y }",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "'\"",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_shell_hcl_and_jinja_syntax_passes_through_as_data(text: str) -> None:
    value = {
        text: {
            "instructions": text,
            "aux_vm_spec": {
                "cpu_count_range": [1, 1],
                "ram_gib_range": [1, 1],
                "build_steps": [
                    {"type": "shell", "commands": [text]},
                    {"type": "file", "source": text, "destination": text},
                ],
            },
        }
    }
    parsed = parse_setup_data({"tasks": value}).tasks[text]
    assert parsed.instructions == text
    assert parsed.aux_vm_spec is not None
    assert [step.model_dump() for step in parsed.aux_vm_spec.build_steps] == [
        {"type": "shell", "commands": (text,)},
        {"type": "file", "source": text, "destination": text},
    ]
    assert text in parse_manifest(json.dumps({"tasks": {text: {}}}).encode()).tasks
