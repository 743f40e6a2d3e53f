"""Makes the local cloud's images: base images (Debian 12 and 13), and layers over them from builders' disks.

mmdebstrap builds the base images from packages, without root. Their disks hold only the file system. Kernel and initrd
lie beside them, since QEMU starts the kernel itself.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from provisioner.base import child_environment
from provisioner.base.clock import now
from provisioner.base.errors import CapacityError, HostError, ImageBuildError, InfrastructureError
from provisioner.base.models import BaseImage, Distribution, MachineRecord, Role
from provisioner.base.printable import beginning, printable
from provisioner.base.progress import Progress
from provisioner.clouds.guest_files import BASE_IMAGE, GUEST, guest_programs, packages
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.vm import disk, qemu
from provisioner.store import images
from provisioner.store.files import sync
from provisioner.store.images import Image, ImageStore

SUITES: dict[Distribution, str] = {"debian-12": "bookworm", "debian-13": "trixie"}
# The machines that may have them.
ROLES: dict[Distribution, tuple[Role, ...]] = {"debian-12": ("primary", "aux"), "debian-13": ("primary",)}
# The virtual size. The file is sparse and takes about 1 GiB.
DISK_GIB = 16
# They lie beside each image's disk.
BOOT_FILES = ("vmlinuz", "initrd.img")


def sources(distribution: Distribution) -> tuple[str, ...]:
    """Returns the archives of a distribution, as lines of apt's sources.list."""
    suite = SUITES[distribution]
    return (
        f"deb http://deb.debian.org/debian {suite} main",
        f"deb http://deb.debian.org/debian {suite}-updates main",
        f"deb http://deb.debian.org/debian-security {suite}-security main",
    )


def digest(distribution: Distribution, ca_bundle: Path | None) -> str:
    """Returns a hash of everything that goes into a distribution's base images, as 16 hexadecimal digits.

    Args:
        ca_bundle: extra CA certificates, PEM.
    """
    sha = hashlib.sha256(f"{sources(distribution)} {DISK_GIB}".encode())
    recipes = [path for path in sorted(BASE_IMAGE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    for path in [*recipes, *(GUEST / name for name in guest_programs())]:
        sha.update(f"{path.relative_to(BASE_IMAGE.parent)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    if ca_bundle:
        sha.update(ca_bundle.read_bytes())
    return sha.hexdigest()[:16]


def base_image(store: ImageStore, base: BaseImage, ca_bundle: Path | None, progress: Progress) -> str:
    """Returns the name of a base image; those of all the distribution's machines are built together if one is missing.

    Args:
        store: the home's images.
        base: the kind of image, for one of the machines that may have this distribution.
        ca_bundle: extra CA certificates that the images trust, PEM.
        progress: shows the build.

    Raises:
        HostError: a program is missing.
        ImageBuildError: a program failed.
    """
    version = digest(base.distribution, ca_bundle)
    kinds = [base.model_copy(update={"role": role}) for role in ROLES[base.distribution]]
    names: dict[Role, str] = {kind.role: f"{kind.label}-{version}" for kind in kinds}

    def missing() -> list[Role]:
        return [role for role, name in names.items() if not store.finished(name)]

    if missing():
        with store.building(f"base-{version}", progress) as directory:
            if directory is not None and missing():
                progress.note(f"Building the base images of {base.distribution} (only once; takes some minutes)")
                installed = build(base.distribution, directory, ca_bundle, progress.output)
                for role in missing():
                    finished = directory / role
                    finished.mkdir(mode=0o700)
                    (directory / f"{role}.raw").rename(finished / "disk.raw")
                    for file_name in (*BOOT_FILES, "build.log"):
                        os.link(directory / file_name, finished / file_name)
                    store.finish(Image(name=names[role], kind="base", created_at=now(), packages=installed), finished)
    return names[base.role]


def build(
    distribution: Distribution, directory: Path, ca_bundle: Path | None, on_output: Callable[[str], None]
) -> tuple[str, ...]:
    """Builds the disks of a distribution's base images into `directory`, and returns the packages that they have.

    Args:
        directory: an empty directory; the output is kept in its build.log.
        ca_bundle: extra CA certificates that the image trusts.
        on_output: called with each line of output.

    Raises:
        HostError: a program is missing.
        ImageBuildError: a program failed.
    """
    tree = directory / "tree.tar"
    with (directory / "build.log").open("w") as log:

        def tell(line: str) -> None:
            log.write(line)
            log.flush()
            on_output(line)

        _run([*_contained(), *_mmdebstrap(distribution, tree, ca_bundle)], directory, tell)
        disks = [str(BASE_IMAGE / "disks.sh"), str(tree), str(directory), str(DISK_GIB), *ROLES[distribution]]
        _run([*_contained(), "sh", *disks], directory, tell)
    packages_of_tree = _packages_of(tree)
    tree.unlink()
    return packages_of_tree


def _packages_of(tree: Path) -> tuple[str, ...]:
    """Returns the packages of the system in a tar archive."""
    with tarfile.open(tree, "r:") as archive:
        for member in archive:
            if member.name.removeprefix("./") == images.STATUS and (file := archive.extractfile(member)):
                return images.installed_packages(file.read(images.MAXIMUM_STATUS_BYTES))
    return ()


def initramfs_hook() -> str:
    """Returns mmdebstrap's essential hook: shell text that makes a tree's initramfs small before it is first built."""
    files = shlex.quote(str(BASE_IMAGE / "local"))
    kept = "etc/initramfs-tools usr/share/initramfs-tools"
    # The files of an installed wheel may have lost their modes.
    return f'cd {files} && cp -R --parents {kept} "$1/" && chmod 0755 "$1"/etc/initramfs-tools/hooks/provisioner'


def _mmdebstrap(distribution: Distribution, tree: Path, ca_bundle: Path | None) -> list[str]:
    customize = [str(BASE_IMAGE / "customize.sh"), "TREE", str(BASE_IMAGE), str(GUEST)]
    if ca_bundle:
        customize.append(str(ca_bundle.resolve()))
    included = [*packages(), *packages("packages-local.txt"), *packages("python/packages.txt")]
    hook = "sh " + " ".join('"$1"' if part == "TREE" else shlex.quote(part) for part in customize)
    return [
        *("mmdebstrap", "--mode=unshare", "--variant=minbase", "--architectures=amd64", "--skip=cleanup/apt/lists"),
        *('--aptopt=Acquire::Languages "none"', "--include=" + ",".join(included)),
        *("--essential-hook=" + initramfs_hook(), "--customize-hook=" + hook),
        *(SUITES[distribution], str(tree), *sources(distribution)),
    ]


def _contained() -> list[str]:
    """The command prefix with which a build ends when its controller does, however that ends, and leaves no mount.

    mmdebstrap mounts /dev and /proc into its tree. Killed outside a mount namespace, it would leave them mounted, and
    removing the tree would remove from them. An ordinary user becomes root of a user namespace with the subordinate
    ids.
    """
    user = [] if os.geteuid() == 0 else ["--map-root-user", "--map-auto"]
    namespaces = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--"]
    return ["setpriv", "--pdeathsig", "KILL", "--", *namespaces]


def _run(argv: list[str], directory: Path, tell: Callable[[str], None]) -> None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    # What a killed mmdebstrap leaves behind is removed with the directory.
    own = {"LC_ALL": "C", "PATH": path, "TMPDIR": str(directory)}
    lines: list[str] = []
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=child_environment.for_download(os.environ) | own, umask=0o022,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise HostError(f"{argv[0]} is not installed.", hint="`provisioner doctor` says how to get it.") from error
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines = [*lines[-30:], line]
                tell(line)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code != 0:
        raise ImageBuildError(
            f"Building the base image failed: {argv[0]} ended with exit code {code}.",
            hint="Is Debian's archive reachable from here? `provisioner doctor` checks this machine.",
            details="".join(lines),
        )


def capture(store: ImageStore, builder: MachineRecord, directory: Path, destination: Path) -> None:
    """Moves the disk of a builder that is powered off.

    Args:
        builder: the machine.
        directory: the machine's.
        destination: the image's directory.

    Raises:
        ImageBuildError: the builder's disk is not what it must be, as after an attack on its QEMU, or its template is
            gone.
    """
    layer = directory / disk.OVERLAY
    try:
        base = _put_over_base(store, builder, directory, layer)
    except disk.UNUSABLE as error:
        raise _unusable(error) from error
    captured = destination / disk.OVERLAY
    layer.rename(captured)
    _complete(captured, base)


def copy(store: ImageStore, builder: MachineRecord, directory: Path, destination: Path, room_bytes: int) -> None:
    """Copies the disk of a builder that runs. It stands still meanwhile.

    Args:
        room_bytes: what the copy may take.

    Raises:
        CapacityError: it would take more.
        InfrastructureError: QEMU or the copy failed.
        ImageBuildError: as for `capture`.
    """
    copied = destination / disk.OVERLAY
    try:
        layers = (directory / disk.OVERLAY, disk.noted_below(directory))
        needed = sum(each.stat().st_blocks * 512 for each in layers if each.suffix != ".raw")
        if needed > room_bytes:
            raise CapacityError(f"The disk of this host has no room for another {needed / disk.GIB:.1f} GiB.")
        with snapshots.held(directory) as qmp:
            qmp.execute("stop")  # QEMU then writes what it has not written yet
            disk.copy(directory / disk.OVERLAY, copied)
        _complete(copied, _put_over_base(store, builder, directory, copied))
    except (disk.UntrustworthyLayerError, disk.ReplacedBelowError) as error:
        raise _unusable(error) from error
    except (OSError, subprocess.SubprocessError, qemu.QMPError) as error:  # such as a disk that became full meanwhile
        raise InfrastructureError(f"The builder's disk could not be copied: {error}") from error


def _put_over_base(store: ImageStore, builder: MachineRecord, directory: Path, layer: Path) -> Path:
    """Makes a builder's disk a layer over its base image alone, whose disk it returns."""
    name, base = builder.image, store.disk(builder.image)
    while base.suffix != ".raw" and (below := store.load(name).base):
        name, base = below, store.disk(below)
    disk.put_over(layer, disk.noted_below(directory), base, builder.size.disk_gib)
    return base


def _unusable(error: Exception) -> ImageBuildError:
    return ImageBuildError(f"The builder's disk is not used: {error}.", hint="Build the image again.")


def _complete(image: Path, base: Path) -> None:
    """Gives a disk a relative path to its base, puts what boots beside it, and has the host's disk take it."""
    disk.name_base(image, f"../{base.parent.name}/{base.name}")
    for file_name in BOOT_FILES:
        os.link(base.parent / file_name, image.parent / file_name)
    sync(image)


# Linux, Documentation/arch/x86/boot.rst: a signature, and a pointer to the version less 0x200.
SIGNATURE, SIGNATURE_AT = b"HdrS", 0x202
POINTER_AT, POINTER_LESS = 0x20E, 0x200
# The version stands in the boot sector's setup code, which has at most 64 sectors.
READ_BYTES = 64 << 10
CHARACTERS = 100


def kernel_version(kernel: Path) -> str:
    """Returns the release of an x86 kernel, such as 6.1.0-37-cloud-amd64.

    Raises:
        OSError: the file cannot be read.
        ValueError: it says no version.
    """
    with kernel.open("rb") as file:
        header = file.read(READ_BYTES)
    if header[SIGNATURE_AT : SIGNATURE_AT + len(SIGNATURE)] != SIGNATURE:
        raise ValueError(f"{kernel} is no x86 kernel")
    [pointer] = struct.unpack_from("<H", header, POINTER_AT)
    at = pointer + POINTER_LESS
    words = header[at : at + CHARACTERS].partition(b"\0")[0].decode(errors="replace").split()
    if not pointer or not words:
        raise ValueError(f"{kernel} says no version")
    return beginning(printable(words[0]), CHARACTERS)
