"""Makes machines follow moto's instances: a machine runs exactly while moto calls its instance running.

One thread compares them several times a second. It starts all processes, since a child ends with its thread.
Files below its directory: instances/ID/ (see machine.py) and images/ID.qcow2.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from tests.aws.ec2 import launch
from tests.aws.ec2.fabric import METADATA, Fabric
from tests.aws.ec2.machine import AS_ON_EC2, Machine
from tests.aws.ec2.metadata import MetadataService, Options
from tests.aws.ec2.observe import observe
from tests.aws.ec2.schedules import Schedules

LOOK_SECONDS = 0.2
# EC2 also forces off a guest that does not react to the power button.
POWER_OFF_SECONDS = 120


class Reconciler:
    """Starts and ends all machines of the fixture.

    Args:
        directory: the directory of their files, removed at the end.
        ami_id: the id of the stand-in for Debian's AMI.
        ami: the directory with the AMI's disk.
        fabric: their network.
        outside: an address and port outside -> the port of the host's loopback that serves it.
    """

    def __init__(
        self, directory: Path, ami_id: str, ami: Path, fabric: Fabric, outside: Mapping[tuple[IPv4Address, int], int]
    ) -> None:
        self._directory = directory
        self._ami = ami
        self._images = {ami_id: ami / "disk.raw"}
        self._fabric = fabric
        self._outside = outside
        self._machines: dict[str, Machine] = {}
        self._services: dict[str, MetadataService] = {}
        self._stopping: dict[str, float] = {}
        self._schedules = Schedules()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        (directory / "images").mkdir(parents=True)
        self._thread = threading.Thread(target=self._run, name="reconciler")
        self._thread.start()

    def console(self, instance_id: str) -> bytes:
        """Returns the end of the serial console's output."""
        machine = self._machines.get(instance_id)
        return machine.console() if machine else b""

    def has_machine(self, instance_id: str) -> bool:
        """Returns whether an instance has a machine."""
        machine = self._machines.get(instance_id)
        return machine is not None and machine.started

    def press(self, instance_id: str, word: str) -> None:
        """Asks the guest for `poweroff` or `reboot`."""
        with self._lock:
            if machine := self._machines.get(instance_id):
                machine.press(word)
                if word == "poweroff":
                    self._stopping[instance_id] = time.monotonic() + POWER_OFF_SECONDS

    def end(self, instance_id: str) -> None:
        """Ends an instance's machine at once, with all its files."""
        with self._lock:
            self._unplug(instance_id)
            if machine := self._machines.pop(instance_id, None):
                machine.remove()

    def capture(self, instance_id: str, image_id: str) -> None:
        """Keeps a stopped machine's disk as an image: a layer over the same image as before."""
        with self._lock:
            if machine := self._machines.get(instance_id):
                image = self._directory / "images" / f"{image_id}.qcow2"
                copy = ["cp", "--sparse=always", "--reflink=auto", str(machine.directory / "disk.qcow2"), str(image)]
                subprocess.run(copy, check=True, stdin=subprocess.DEVNULL)
                self._images[image_id] = image

    def copy_image(self, source_id: str, image_id: str) -> None:
        """Gives an image a second id. Images are never written to."""
        if source := self._images.get(source_id):
            self._images[image_id] = source

    def close(self) -> None:
        """Ends all machines and removes all files."""
        self._closed.set()
        self._thread.join()
        for instance_id in list(self._machines):
            self.end(instance_id)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                with self._lock:
                    self._look()
            except Exception:  # logged, as the next pass may succeed
                traceback.print_exc(file=sys.stderr)

    def _look(self) -> None:
        self._schedules.act()
        current = {instance.id: (backend, instance) for backend, instance in _instances()}
        for instance_id in set(self._machines) - set(current):  # moto was reset
            self.end(instance_id)
        for instance_id, (_, instance) in current.items():
            machine = self._machines.get(instance_id)
            if instance.state == "terminated":
                self.end(instance_id)
                continue
            off = machine is not None and machine.started and not machine.alive()
            if off or (instance.state == "stopping" and self._overdue(instance_id)):
                self._ended(instance, machine)
        live = [pair for pair in current.values() if pair[1].state in ("running", "stopping")]
        self._fabric.update(observe(live))
        for backend, instance in live:
            if instance.metadata_options.state == "pending":  # the fabric has the new options now
                instance.metadata_options.state = "applied"
            if instance.state == "running" and not self.has_machine(instance.id):
                self._start(backend, instance)

    def _overdue(self, instance_id: str) -> bool:
        """Returns whether an instance that should stop has no machine, or one that does not react.

        The time is not known yet for an instance whose stop has just been requested.
        """
        return not self.has_machine(instance_id) or time.monotonic() > self._stopping.get(instance_id, math.inf)

    def _start(self, backend: Any, instance: Any) -> None:
        image = self._images.get(instance.image_id)
        if image is None:
            return  # an image without a disk here
        try:
            self._launch(backend, instance, image)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            instance.terminate()
            instance.state_reason = StateReason("Server.InternalError: see the server's log", "Server.InternalError")

    def _launch(self, backend: Any, instance: Any, image: Path) -> None:
        quick = not (self._directory / AS_ON_EC2).exists()
        hardware = launch.hardware(backend, instance, image, self._ami, quick=quick)
        machine = self._machines.get(instance.id)
        if machine is None:
            machine = Machine(self._directory / "instances" / instance.id, hardware)
            self._machines[instance.id] = machine
            machine.make_disk()
        machine.hardware = hardware  # a start after a stop may bring another public address
        service = MetadataService(launch.metadata_values(backend, instance), lambda: _options(instance))
        self._services[instance.id] = service
        card, passt = machine.start()
        redirects = {(METADATA, 80): service.port, **self._outside}
        interface = observe([(backend, instance)]).interfaces[instance.id]
        self._fabric.attach(interface, hardware.mac, card, passt, redirects)

    def _ended(self, instance: Any, machine: Machine | None) -> None:
        """Handles a machine that was powered off, from inside or outside, or whose QEMU failed."""
        stop_requested = instance.state == "stopping"
        failed = machine is not None and machine.failed()
        if machine and machine.alive():
            print(f"{instance.id}: no reaction to the power button", file=sys.stderr)
        self._unplug(instance.id)
        if machine:
            machine.kill()
        if not stop_requested and instance.instance_initiated_shutdown_behavior == "terminate":
            instance.terminate()
        else:
            for nic in instance.nics.values():
                nic.stop()
            instance._state.name, instance._state.code = "stopped", 80
        if not stop_requested:
            code = "Server.InternalError" if failed else "Client.InstanceInitiatedShutdown"
            instance.state_reason = StateReason(f"{code}: Instance initiated shutdown", code)

    def _unplug(self, instance_id: str) -> None:
        self._stopping.pop(instance_id, None)
        self._fabric.detach(instance_id)
        if service := self._services.pop(instance_id, None):
            service.close()


def _options(instance: Any) -> Options:
    options = instance.metadata_options
    return Options(options.http_endpoint != "disabled", options.http_tokens == "required")


def _instances() -> Iterator[tuple[Any, Any]]:
    """Returns moto's EC2 backends and their instances."""
    for account in list(ec2_backends.values()):
        for backend in list(account.values()):
            for instance in backend.all_instances():
                yield backend, instance
