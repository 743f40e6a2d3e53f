"""A family that looks at the process in which it runs, from every side. Copied into the machines of test_warm.py."""

# ruff: noqa: E402, PTH, SIM115

import sys

MODULES = sorted(sys.modules)  # before this module imports what it needs

import atexit
import errno
import faulthandler
import gc
import json
import locale
import os
import re
import resource
import signal
import stat
import subprocess
import threading
import time
import traceback
import tracemalloc
import warnings


def _text(path):
    with open(path) as file:
        return file.read()


def _status(*names):
    with open("/proc/self/status") as file:
        return [line.split() for line in file if line.partition(":")[0] in names]


def _error(work):
    try:
        return work()
    except OSError as error:
        return errno.errorcode[error.errno]


def _links():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = re.sub(r"/tmp[^/]{8}/", "/tmp/", os.readlink("/proc/self/fd/" + name))
        except FileNotFoundError:  # that of the list
            continue
    return found


def _stream(stream):
    layers, layer = [], stream
    while layer is not None:
        layers.append([type(layer).__name__, layer.name, getattr(layer, "mode", None), layer.isatty()])
        layer = getattr(layer, "buffer", None) or getattr(layer, "raw", None)
    names = ("encoding", "errors", "line_buffering", "write_through", "newlines", "closed", "_CHUNK_SIZE")
    status = os.fstat(stream.fileno())
    return [
        layers, stream.fileno(), [getattr(stream, name) for name in names], stream.readable(), stream.writable(),
        stream.seekable(), _error(stream.tell), stat.S_IFMT(status.st_mode), os.get_inheritable(stream.fileno()),
    ]  # fmt: skip


def _names(things):
    return [re.sub(r" at 0x\w+", "", repr(thing)) for thing in things]


def _main():
    main = sys.modules["__main__"]
    return [main.__name__, main.__file__, type(main.__loader__).__name__, main.__spec__, sorted(vars(main))]


PROBES = {
    "argv": lambda: sys.argv,
    "orig_argv": lambda: sys.orig_argv,
    "command line": lambda: _text("/proc/self/cmdline"),
    "process name": lambda: _text("/proc/self/comm"),
    "flags": lambda: repr(sys.flags),
    "x options": lambda: [sys._xoptions, sys.warnoptions],
    "version": lambda: [sys.version, sys.implementation.name, sys.hexversion],
    "prefixes": lambda: [sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix, sys.platlibdir],
    "main": _main,
    "modules": lambda: MODULES,
    "path": lambda: sys.path,
    "finders": lambda: [_names(sys.meta_path), _names(sys.path_hooks)],
    "finder cache": lambda: sorted(name for name in sys.path_importer_cache),
    "environ": lambda: dict(os.environ),
    "environment of children": lambda: sorted(subprocess.check_output(["env", "-0"], text=True).split("\0")),
    "first environment": lambda: sorted(_text("/proc/self/environ").split("\0")),
    "putenv": lambda: [os.putenv("PUT", "1"), subprocess.check_output(["printenv", "PUT"], text=True, env=None)][1:],
    "directory": os.getcwd,
    "umask": lambda: [os.umask(0o022), os.umask(0o022)],
    "open files": _links,
    "stdin": lambda: [_stream(sys.stdin), sys.stdin is sys.__stdin__, sys.stdin.read(), os.read(0, 1).decode()],
    "stdout": lambda: [_stream(sys.stdout), sys.stdout is sys.__stdout__],
    "stderr": lambda: [_stream(sys.stderr), sys.stderr is sys.__stderr__],
    "standard descriptors": lambda: [os.fstat(n).st_mode for n in (0, 1, 2)],
    "signals": lambda: {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
    "signal masks": lambda: _status("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd"),
    "blocked": lambda: list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup descriptor": lambda: signal.set_wakeup_fd(-1),
    "timers": lambda: [signal.getitimer(kind) for kind in (0, 1, 2)] + [signal.alarm(0)],
    "limits": lambda: {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name},
    "nice": lambda: [os.nice(0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "out of memory": lambda: _text("/proc/self/oom_score_adj"),
    "rights": lambda: _status("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"),
    "seccomp": lambda: _status("Seccomp", "THP_enabled", "CoreDumping", "TracerPid"),
    "personality": lambda: [_text("/proc/self/personality"), _text("/proc/self/coredump_filter")],
    "namespaces": lambda: sorted(os.readlink("/proc/self/ns/" + name) for name in os.listdir("/proc/self/ns")),
    "cgroup": lambda: re.sub(r"call-[0-9-]+", "call", _text("/proc/self/cgroup")),
    "session": lambda: [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), _error(lambda: os.tcgetpgrp(0))],
    "terminal": lambda: _error(lambda: os.open("/dev/tty", os.O_RDWR)),
    "children": lambda: _error(lambda: os.waitpid(-1, os.WNOHANG)),
    "threads": lambda: [len(os.listdir("/proc/self/task")), [each.name for each in threading.enumerate()]],
    "main thread": lambda: [
        threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
        threading.main_thread().ident == threading.get_ident(), threading.current_thread() is threading.main_thread(),
    ],
    "thread": lambda: [thread := threading.Thread(target=time.sleep, args=[0]), thread.start(), thread.join()][1:],
    "encodings": lambda: [
        sys.getdefaultencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), locale.getencoding(),
    ],
    "locale": lambda: [locale.setlocale(locale.LC_ALL, None), locale.getlocale(), locale.nl_langinfo(locale.CODESET)],
    "time zone": lambda: [time.tzname, time.timezone, time.localtime(0).tm_hour, time.localtime(1e9).tm_gmtoff],
    "warnings": lambda: [list(map(repr, warnings.filters)), warnings.defaultaction],
    "garbage": lambda: [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.callbacks, gc.garbage],
    "limits of the interpreter": lambda: [
        sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits(),
    ],
    "hooks": lambda: [
        sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile(),
        sys.unraisablehook is sys.__unraisablehook__, threading.excepthook is threading.__excepthook__,
        sys.breakpointhook is sys.__breakpointhook__, sys.dont_write_bytecode, sys.pycache_prefix, sys.flags.safe_path,
    ],
    "tracing": lambda: [faulthandler.is_enabled(), tracemalloc.is_tracing()],
    "atexit": lambda: atexit._ncallbacks(),
    "stack": lambda: [[frame.filename, frame.lineno, frame.name] for frame in traceback.extract_stack()][:-3],
    "sockets": lambda: [a.send(b"x") + len(b.recv(1)) for a, b in [__import__("socket").socketpair()]],
    "hash": lambda: hash("x") if os.environ.get("PYTHONHASHSEED", "random") != "random" else None,
    "timings": lambda: [time.process_time() < 60, time.thread_time() < 60, time.perf_counter() > 0],
}  # fmt: skip


class TaskFamily:
    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def start(t):
        print(json.dumps({name: repr(probe()) for name, probe in PROBES.items()}))
