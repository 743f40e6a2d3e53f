"""Makes the Python of families from Debian's: in /usr/local, with its packages in site-packages, as in the image
python:3.11 or python:3.13.

Runs as root in the machine or its tree, with Debian's /usr/bin/python3 and the packages of packages.txt. Debian's
Python stays as it is, and removing it does not harm the copy: neither refers to the other.
Usage: install.py DIRECTORY. DIRECTORY contains metr_task_standard and its .dist-info, which are moved.
"""

from __future__ import annotations

import compileall
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
NAME = f"python{VERSION}"
LIBRARY = Path("/usr/lib", NAME)
DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")
PREFIX = Path("/usr/local")
COPY = PREFIX / "lib" / NAME
SITE_PACKAGES = COPY / "site-packages"
WHEELS = COPY / "ensurepip/_bundled"

Edits = dict[str, list[tuple[str, str]]]

# Debian's changes that send packages to dist-packages: module -> (pattern, what it becomes); each must match once.
_SITE: Edits = {
    "site.py": [
        (r"            if is_virtual_environment:\n.*?# this one is deprecated for Debian\n", ""),
        (r"    is_virtual_environment = .*?\n\n", ""),
        (r'(            for libdir in libdirs:\n[^#]*?)"dist-packages"\)', r'\1"site-packages")'),
    ],
    "ensurepip/__init__.py": [(r"(def _bootstrap\(.*?)    _ensurepip_is_disabled_in_debian_for_system\(\)\n", r"\1")],
}
_SCHEMES = [
    (r"    'deb_system': \{.*?    'posix_home': \{", "    'posix_home': {"),
    (r", 'posix_local', 'deb_system'\)", ")"),
    (r'    if sys\.base_prefix != sys\.prefix or hasattr\(sys, "real_prefix"\):\n.*?(    return \{)', r"\1"),
    (r"'prefix': prefix_scheme", "'prefix': 'posix_prefix'"),
]
_DISTUTILS: Edits = {
    "distutils/sysconfig.py": [
        (r"        elif is_default_prefix and not is_virtual_environment\(\):\n.*?\n(        else:)", r"\1"),
    ],
    "distutils/command/install.py": [
        (r"# add the Debian install schemes.*?(# Copy from sysconfig)", r"\1"),
        (
            r"            if self\.install_layout:\n.*?(    def finalize_other)",
            r'            self.select_scheme("unix_prefix")\n\n\1',
        ),
    ],
    "distutils/command/install_egg_info.py": [("no_pyver = True", "no_pyver = False")],
    # Debian's setuptools asks for what Debian's _distutils_system_mod would add.
    "site-packages/setuptools/_distutils/command/install.py": [
        (r"(class install\(Command\):\n)", r"\1    install_layout = prefix_option = None\n"),
    ],
}
# Of Debian 12 and Debian 13. Python 3.12 removed distutils.
EDITS: dict[str, Edits] = {
    "3.11": {**_SITE, "sysconfig.py": _SCHEMES, **_DISTUTILS},
    "3.13": {**_SITE, "sysconfig/__init__.py": _SCHEMES},
}

# Debian's packages of each Python project that runs a family's tests, or that the image of that Python has: python:3.13
# has no setuptools and no wheel.
_PYTEST = [["python3-pytest"], ["python3-iniconfig"], ["python3-packaging"], ["python3-pluggy"]]
PROJECTS = {
    "3.11": [
        ["python3-pip"],
        ["python3-setuptools", "python3-pkg-resources"],
        ["python3-wheel"],
        *_PYTEST,
        ["python3-attr"],
        ["python3-py"],
    ],
    "3.13": [["python3-pip"], *_PYTEST],
}


def edited(text: str, edits: list[tuple[str, str]]) -> str:
    """Return a module's text after its edits.

    Raises:
        ValueError: the text is not what the edits were made for.
    """
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{pattern!r} matches {count} times")
    return text


def moved_to_prefix(text: str, multiarch: str) -> str:
    """Return what the build has recorded of its paths (Makefile, _sysconfigdata) for the copy."""
    text = text.replace(f"/usr/lib/{multiarch}", f"{PREFIX}/lib").replace("/usr/share/python-wheels/", str(WHEELS))
    text = re.sub(r"/usr/(lib|include)/python3", rf"{PREFIX}/\1/python3", text)
    # As words only: programs such as /usr/bin/install stay where they are.
    return re.sub(r"/usr(/bin|/include|/lib|/share|/share/man)?(?=[\s'\"]|$)", rf"{PREFIX}\1", text)


def copy_library() -> None:
    """Copy the standard library with what was compiled of it, the headers and the wheels of ensurepip."""

    def skipped(directory: str, names: list[str]) -> set[str]:
        if directory == str(LIBRARY):
            return {"EXTERNALLY-MANAGED", "sitecustomize.py", "_distutils_system_mod.py"} & set(names)
        if "/config-" in directory:  # the static libraries are large
            return {name for name in names if name.startswith("lib")}
        return set()

    shutil.copytree(LIBRARY, COPY, symlinks=True, ignore=skipped, dirs_exist_ok=True)
    for path in COPY.glob("__pycache__/_distutils_system_mod.*"):
        path.unlink()
    shutil.copytree("/usr/share/python-wheels", WHEELS, dirs_exist_ok=True)
    include = PREFIX / "include" / NAME
    shutil.copytree(Path("/usr/include", NAME), include, dirs_exist_ok=True)
    # Debian's pyconfig.h only includes that of the architecture.
    multiarch = sysconfig.get_config_var("MULTIARCH")
    shutil.copy2(Path("/usr/include", multiarch, NAME, "pyconfig.h"), include)


def adapt_library() -> None:
    """Edit the modules and records of the copy that name Debian's directories."""
    changed = []
    for name, edits in EDITS[VERSION].items():
        path = COPY / name
        path.write_text(edited(path.read_text(), edits))
        changed.append(path)
    multiarch = sysconfig.get_config_var("MULTIARCH")
    records = [*COPY.glob("_sysconfigdata_*.py"), *COPY.glob("config-*/Makefile")]
    for path in records:
        path.write_text(moved_to_prefix(path.read_text(), multiarch))
    for path in [*changed, *(path for path in records if path.suffix == ".py")]:
        compileall.compile_file(path, force=True, quiet=1)


class Frozen(ctypes.Structure):
    """Python 3.13's `struct _frozen` (Include/cpython/import.h). A table of them ends with one without a name."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("size", ctypes.c_int),
        ("is_package", ctypes.c_int),
    )


def without_first(program: bytes, entries: bytes, size: int) -> bytes:
    """Return a program without the first of some entries of `size` bytes, the last of which ends their table.

    Raises:
        ValueError: the program does not have them exactly once.
    """
    if program.count(entries) != 1:
        raise ValueError(f"the interpreter has the table of frozen modules {program.count(entries)} times")
    return program.replace(entries, entries[size:] + entries[-size:])


def copy_interpreter(target: Path) -> None:
    """Copy the interpreter that runs this, without its frozen `site`, which looks for packages in dist-packages.

    It cannot be linked again as main.c is: Debian's libpython3.13.a lacks a part, Hacl_Hash_SHA2.o.
    """
    table = ctypes.POINTER(Frozen).in_dll(ctypes.pythonapi, "_PyImport_FrozenStdlib")
    names: list[bytes] = []
    while table[len(names)].name:
        names.append(table[len(names)].name)
    size, site = ctypes.sizeof(Frozen), names.index(b"site")
    # The program is linked to one address, so its file has the table as it is in memory.
    entries = ctypes.string_at(ctypes.addressof(table[site]), (len(names) + 1 - site) * size)
    target.write_bytes(without_first(Path(os.path.realpath(sys.executable)).read_bytes(), entries, size))
    target.chmod(0o755)


def link_interpreter(source: Path, target: Path) -> None:
    """Link the interpreter with main.c."""
    [archive] = LIBRARY.glob(f"config-*/lib{NAME}.a")
    options = ["-O2", "-s", "-no-pie", f"-I/usr/include/{NAME}", "-Wl,--export-dynamic,-O1,-Bsymbolic-functions"]
    libraries = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive", "-lexpat", "-lz", "-lm", "-ldl"]
    subprocess.run(["gcc", *options, str(source), "-o", str(target), *libraries], check=True)


def make_interpreter(source: Path) -> None:
    """Make the interpreter, and give it its names."""
    programs = PREFIX / "bin"
    if VERSION == "3.11":
        link_interpreter(source, programs / NAME)
    else:
        copy_interpreter(programs / NAME)
    shutil.copy2(os.path.realpath(f"/usr/bin/{NAME}-config"), programs / f"{NAME}-config")
    links = {
        "python3": NAME,
        "python": "python3",
        "python3-config": f"{NAME}-config",
        "python-config": "python3-config",
    }
    for link, target in links.items():
        (programs / link).unlink(missing_ok=True)
        (programs / link).symlink_to(target)


def copy_project(packages: list[str]) -> None:
    """Copy a Python project out of its Debian packages, with a record of its files: without, pip cannot replace it."""
    listed = subprocess.run(["dpkg-query", "-L", *packages], check=True, capture_output=True, text=True)
    copied = []
    for path in map(Path, listed.stdout.split("\n")):
        if path.is_relative_to(DEBIAN_PACKAGES) and path.is_file():
            copied += _copy_module(path)
        elif path.parent == Path("/usr/bin") and path.is_file() and not path.is_symlink():
            copied.append(_copy_program(path))
    parts = {path.relative_to(SITE_PACKAGES).parts[0] for path in copied if path.is_relative_to(SITE_PACKAGES)}
    [information] = [SITE_PACKAGES / part for part in parts if part.endswith((".dist-info", ".egg-info"))]
    if information.suffix == ".dist-info":
        (information / "INSTALLER").write_text("pip\n")
        rows = [f"{os.path.relpath(path, SITE_PACKAGES)},,\n" for path in [*copied, information / "INSTALLER"]]
        (information / "RECORD").write_text("".join(sorted({*rows, f"{information.name}/RECORD,,\n"})))
    else:
        rows = [f"{os.path.relpath(path, information)}\n" for path in copied]
        (information / "installed-files.txt").write_text("".join(sorted(rows)))


def _copy_module(path: Path) -> list[Path]:
    compiled = Path(importlib.util.cache_from_source(str(path))) if path.suffix == ".py" else path
    pair = [each for each in dict.fromkeys([path, compiled]) if each.is_file()]
    targets = [SITE_PACKAGES / each.relative_to(DEBIAN_PACKAGES) for each in pair]
    for source, target in zip(pair, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    return targets


def _copy_program(path: Path) -> Path:
    target = PREFIX / "bin" / path.name
    target.write_text(re.sub(r"\A#!.*", f"#!{PREFIX}/bin/{NAME}", path.read_text()))
    target.chmod(0o755)
    return target


def main(directory: Path) -> None:
    """Make the copy."""
    copy_library()
    for packages in PROJECTS[VERSION]:
        copy_project(packages)
    adapt_library()
    make_interpreter(Path(__file__).with_name("main.c"))
    for path in directory.glob("metr_task_standard*"):
        shutil.rmtree(SITE_PACKAGES / path.name, ignore_errors=True)
        shutil.move(path, SITE_PACKAGES)
    compileall.compile_dir(SITE_PACKAGES / "metr_task_standard", quiet=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
