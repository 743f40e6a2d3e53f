"""A family that writes down in what kind of process start() and score() run."""

import json
import os
import pathlib
import sys


def _status():
    names = (
        "Uid",
        "Gid",
        "Groups",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "CapEff",
        "CapBnd",
        "NoNewPrivs",
        "Seccomp",
        "Threads",
    )
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.partition(":")[0] in names]


def _look(name):
    process = pathlib.Path("/proc/self")
    like_others = {
        "argv": sys.orig_argv,
        "modules": sorted(sys.modules),
        "environ": dict(os.environ),
        "path": sys.path,
        "files": sorted(os.listdir("/proc/self/fd")),
        "status": _status(),
        "limits": (process / "limits").read_text(),
        "namespaces": sorted(os.readlink(path) for path in (process / "ns").iterdir()),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "directory": os.getcwd(),
    }
    found = {
        "parent": pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1],
        "cgroup": (process / "cgroup").read_text().strip(),
        "like others": like_others,
    }
    pathlib.Path(f"/root/{name}.json").write_text(json.dumps(found))


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return "Return a number."

    @staticmethod
    def start(t):
        _look("start")

    @staticmethod
    def score(t, submission):
        _look("score")
        return float(submission)
