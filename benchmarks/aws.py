"""Measures the aws cloud's load on the controller, and that of plain Terraform on the same root, with a moto server.

Usage: python benchmarks/aws.py [--environments 1 20]

Each environment has two machines. "Ours" creates and destroys them as the product does, including the check that all is
gone; "plain" is terraform init, apply and destroy. CPU seconds are those of this process and all its descendants
(Terraform, the provider), without moto. Memory is their total proportional set size, sampled five times a second. The
region's network exists beforehand. EC2 throttles at its published rates, and plain Terraform retries as often as the
provider does by default: ours has fewer retries, since the product decides itself what to try next. Most of the wall
time is spent waiting in the provider.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rates import Watch  # noqa: E402
from provisioner.base.models import Environment  # noqa: E402
from provisioner.machines.create import create_machines, root_files  # noqa: E402
from provisioner.machines.destroy import destroy_machines  # noqa: E402
from provisioner.session import Session  # noqa: E402
from provisioner.terraform.process import terraform_environment  # noqa: E402
from provisioner.terraform.stack import Stack  # noqa: E402
from tests.aws.account import Account, make_environment  # noqa: E402
from tests.provider_mirror import use_provider_mirror  # noqa: E402

SERVER = """
import sys
from tests.aws.proxy import serving
with serving() as api:
    print(api.url, flush=True)
    for line in sys.stdin:
        print(api.throttle.report(), flush=True)
"""
SAMPLE_SECONDS = 0.2
# What EC2 refused, by its own code, in one of Terraform's diagnostics.
ERROR = re.compile(r"api error (\w+)")


@contextlib.contextmanager
def moto() -> Iterator[tuple[str, Callable[[], str]]]:
    """Runs moto in its own process; yields its URL, and what tells how many requests it has throttled since last."""
    argv = [sys.executable, "-c", SERVER]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = server.stdout.readline().strip()

        def rates() -> str:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("rates\n")
            server.stdin.flush()
            return server.stdout.readline()

        yield url, rates
        server.stdin.close()


def descendants(pid: int) -> list[int]:
    """Returns the ids of a process and all its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                pids += descendants(int(child))
    return pids


class Memory:
    """Samples the memory of this process and its descendants.

    Args:
        without: ids of processes that are not counted.
    """

    def __init__(self, without: set[int]) -> None:
        self.peak_mib = 0.0
        self._without = without
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            total = 0
            for pid in set(descendants(os.getpid())) - self._without:
                with contextlib.suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                    total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            self.peak_mib = max(self.peak_mib, total / 1024)

    def stop(self) -> None:
        """Ends the sampling."""
        self._ended.set()


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of all ended descendants."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measured(name: str, count: int, work: Callable[[], None], without: set[int], rates: Callable[[], str]) -> None:
    """Runs the work, and prints its figures."""
    rates()  # what was before does not count
    watch = Watch()
    memory, cpu, begin = Memory(without), cpu_seconds(), time.monotonic()
    work()
    wall, cpu = time.monotonic() - begin, cpu_seconds() - cpu
    memory.stop()
    print(
        f"{name:<6} {count:>4} environments: {wall:7.1f} s wall, {cpu:6.1f} CPU s, {cpu / count:6.2f} CPU s each, "
        f"{count / wall * 60:5.1f} a minute, {memory.peak_mib:6.0f} MiB at most\n       {watch.sentence(rates())}",
        flush=True,
    )


def ours(session: Session, environments: list[Environment]) -> None:
    """Creates and destroys environments as the product does."""
    destroy_machines(session, *create_machines(session, environments))


def with_usual_retries(files: dict[str, str]) -> dict[str, str]:
    """Returns a root's files with the provider's own number of retries in the place of ours."""
    provider = json.loads(files["provider.tf.json"])
    del provider["provider"]["aws"][0]["max_retries"]
    return {**files, "provider.tf.json": json.dumps(provider)}


def plain(root: Path) -> None:
    """Creates and destroys the same root with plain Terraform. Prints the errors that it met."""
    clouds = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for arguments in (("init",), ("apply", "-auto-approve"), ("destroy", "-auto-approve")):
        done = subprocess.run(
            ["terraform", *arguments, "-input=false", "-no-color"], cwd=root,
            env=terraform_environment(os.environ, clouds),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        errors = Counter(ERROR.findall(done.stderr))
        if done.returncode:
            print(f"plain: terraform {arguments[0]} failed: {errors.total()} errors", flush=True)
        for error, times in errors.most_common(5):
            print(f"       {times} of them: {error[:300]}", flush=True)


def main() -> None:
    """Runs the benchmark and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 20])
    counts = parser.parse_args().environments
    use_provider_mirror()
    with moto() as (url, rates), tempfile.TemporaryDirectory() as directory:
        for name, value in (("AWS_ENDPOINT_URL", url), ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x")):
            os.environ[name] = value
        without = set(descendants(os.getpid())) - {os.getpid()}
        account = Account(Path(directory))
        session = account.session()
        for count in (0, *counts):
            # The first round, of one environment, creates the network and the initialised root that later stacks copy.
            environments = [make_environment(session, stack=f"stack-{count}") for _ in range(count or 1)]
            if not count:
                ours(session, environments)
                continue
            root = Path(directory) / f"plain-{count}"
            placed = [each.model_copy(update={"placement": session.cloud.place(each)}) for each in environments]
            Stack(root).write(with_usual_retries(root_files(session, placed)))
            measured("ours", count, partial(ours, session, environments), without, rates)
            measured("plain", count, partial(plain, root), without, rates)


if __name__ == "__main__":
    main()
