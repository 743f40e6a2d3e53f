"""Runs a registry of container images in a network namespace, behind a router.

Builders reach no address of this host itself, and no network in which it has one.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import tarfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

# For tests of networks (RFC 2544), so that no real host has them.
_HERE, _ROUTER, _THERE = "198.18.77.1", "198.18.77.2", "198.18.79.1"
_PORT = 5000
_START_SECONDS = 60.0
_TYPE = "application/vnd.docker.distribution.manifest.v2+json"


@contextlib.contextmanager
def mirror(archive: Path, image: str, cache: Path, directory: Path) -> Iterator[str]:
    """Runs Debian's docker-registry as a mirror of the Docker Hub with one image, and returns its address. As root.

    Args:
        archive: an archive of the image, of one layer.
        image: its name and tag there.
        cache: a directory that is kept between test runs.
        directory: where the registry keeps its data.
    """
    program = _program(cache)
    settings = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(directory / "registry")}},
        "http": {"addr": f"{_THERE}:{_PORT}"},
    }
    (directory / "registry.json").write_text(json.dumps(settings))
    with _namespace() as name:
        serve: list[str | Path] = [program, "serve", directory / "registry.json"]
        server = subprocess.Popen(["ip", "netns", "exec", name, *serve], stdin=subprocess.DEVNULL)
        try:
            address = f"http://{_THERE}:{_PORT}"
            _wait_for(address, server)
            _push(archive, image, address)
            yield address
        finally:
            server.terminate()
            server.wait()


def _program(cache: Path) -> Path:
    """Returns the program of Debian's package, which is not installed: that would start it as a service."""
    directory = cache / "containers"
    program = directory / "docker-registry" / "usr" / "bin" / "docker-registry"
    if not program.exists():
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "--quiet", "docker-registry"], cwd=directory, check=True)
        [package] = directory.glob("docker-registry_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, directory / "docker-registry"], check=True)
        package.unlink()
    return program


@contextlib.contextmanager
def _namespace() -> Iterator[str]:
    """Makes a network namespace that this host reaches, and returns its name."""
    name = f"provisioner-{os.getpid()}"
    outer, inner = f"pr{os.getpid()}o", f"pr{os.getpid()}i"
    commands = [
        f"ip link add {outer} type veth peer name {inner} netns {name}",
        f"ip address add {_HERE}/30 dev {outer}",
        f"ip link set {outer} up",
        f"ip -netns {name} address add {_ROUTER}/30 dev {inner}",
        f"ip -netns {name} link set {inner} up",
        f"ip -netns {name} address add {_THERE}/32 dev lo",
        f"ip -netns {name} link set lo up",
        f"ip route add {_THERE} via {_ROUTER}",
    ]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)  # and the pair with it


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}/v2/", timeout=10).close()
            return
        except OSError:
            assert server.poll() is None, "the registry has ended"
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.1)


def _push(archive: Path, image: str, address: str) -> None:
    """Uploads an image as `docker push` does (OCI's distribution specification)."""
    name, _, tag = image.rpartition(":")
    with tarfile.open(archive) as opened:
        [described] = json.loads(_member(opened, "manifest.json"))
        [layer] = described["Layers"]
        parts = {"config": _member(opened, described["Config"]), "layer": gzip.compress(_member(opened, layer), 1)}
    types = {
        "config": "application/vnd.docker.container.image.v1+json",
        "layer": "application/vnd.docker.image.rootfs.diff.tar.gzip",
    }
    descriptors = {}
    for part, data in parts.items():
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        descriptors[part] = {"mediaType": types[part], "size": len(data), "digest": digest}
        location = _call("POST", f"{address}/v2/{name}/blobs/uploads/")
        mark = "&" if "?" in location else "?"
        _call("PUT", f"{location}{mark}digest={urllib.parse.quote(digest)}", data, "application/octet-stream")
    layers = [descriptors["layer"]]
    manifest = {"schemaVersion": 2, "mediaType": _TYPE, "config": descriptors["config"], "layers": layers}
    _call("PUT", f"{address}/v2/{name}/manifests/{tag}", json.dumps(manifest).encode(), _TYPE)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file
    return file.read()


def _call(method: str, url: str, data: bytes = b"", kind: str = "application/octet-stream") -> str:
    request = urllib.request.Request(url, data, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.headers["Location"])
