"""A family that removes Debian's Python, puts traps for others, and works on with the Python of families."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

TRAPS = pathlib.Path("/opt/traps")


INSTALLED = "import extension, importlib.metadata; print(importlib.metadata.version('py'))"


def _output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _install(version):
    """Compiles the extension and has pip install it."""
    shutil.rmtree("extension/build", ignore_errors=True)
    command = ["pip", "install", "-q", "--no-index", "--no-build-isolation", "./extension"]
    subprocess.run(command, check=True, env={**os.environ, "VERSION": version})
    assert _output("python3", "-c", INSTALLED) == version


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return "Return 1."

    @staticmethod
    def install():
        found = {
            "python": [sys.executable, sys.prefix, sys.base_prefix, *sys.version_info[:2]],
            "site-packages": sysconfig.get_paths()["purelib"],
            "path": sys.path,
            "marked": (pathlib.Path(sysconfig.get_paths()["stdlib"]) / "EXTERNALLY-MANAGED").exists(),
            "programs": [_output("which", name) for name in ("python", "pip", "pip3", "pytest", "python3-config")],
            "debian": _output("/usr/bin/python3", "-c", "import sys; print(sys.prefix)"),
        }
        pathlib.Path("/opt/python.json").write_text(json.dumps(found))
        # Takes the place of a project that is installed, and has to be compiled.
        _install("99.0")
        subprocess.run(["python3", "-m", "venv", "--without-pip", "/opt/venv"], check=True)
        for command in (["remove", "python3.11", "python3-pip"], ["autoremove"]):
            subprocess.run(["apt-get", "-qq", "-y", *command], check=True)
        assert not pathlib.Path("/usr/bin/python3").exists()
        _install("1.0")
        # A process that looks there breaks.
        json_module = pathlib.Path("/usr/lib/python3.11/json/__init__.py")
        json_module.parent.mkdir(parents=True, exist_ok=True)
        json_module.write_text("raise SystemExit(66)\n")
        TRAPS.mkdir()
        (TRAPS / "sitecustomize.py").write_text("import sys\nif sys.prefix != '/usr/local': sys.exit(67)\n")
        with open("/etc/environment", "a") as file:
            file.write(f"PYTHONPATH={TRAPS}\nPYTHONHOME=/usr/local\n")

    @staticmethod
    def start(t):
        version = _output("runuser", "agent", "--group=protected", "--login", "-c", "python --version")
        pathlib.Path("/root/agent-python").write_text(version)

    @staticmethod
    def score(t, submission):
        # Needs Debian's libraries and not its Python.
        for name in ("ctypes", "lzma", "readline", "sqlite3", "ssl", "uuid", "zlib"):
            importlib.import_module(name)
        import extension

        assert os.environ["PYTHONPATH"] == str(TRAPS)
        return extension.one() * float(submission)
