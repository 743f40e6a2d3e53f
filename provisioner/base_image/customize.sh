#!/bin/sh
# mmdebstrap's customize hook: turns a plain Debian tree into the base image's tree.
# Usage: customize.sh TREE BASE_IMAGE GUEST [CA_BUNDLE]
set -eu
tree=$1 common=$2 guest=$3 ca_bundle=${4:-}

sh "$common/common.sh" "$tree" "$common/rootfs" "$guest" ${ca_bundle:+"$ca_bundle"}
sh "$common/runtime.sh" "$tree"
sh "$common/family_python.sh" "$tree" "$common/python"
cp -R --no-preserve=ownership,mode "$common/local/." "$tree/"
# The kernel mounts the root file system read-write; an entry here would make the boot wait for udev.
: > "$tree/etc/fstab"
printf 'localhost\n' > "$tree/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost\n' > "$tree/etc/hosts"
# The controller gives each machine its id.
: > "$tree/etc/machine-id"
# boot.sh writes resolv.conf, so it must be a plain file.
rm -f "$tree/etc/resolv.conf"
: > "$tree/etc/resolv.conf"

# The kernel and its initramfs are files next to the disk. Packages must not build another initramfs, which is useless.
printf 'update_initramfs=no\n' > "$tree/etc/initramfs-tools/update-initramfs.conf"

# Without KVM each generator takes a fifth of a second of the boot, and none of them has anything to do here.
mkdir -p "$tree/etc/systemd/system-generators"
for generator in cryptsetup debug getty gpt-auto hibernate-resume integritysetup run system-update tpm2 veritysetup; do
    ln -s /dev/null "$tree/etc/systemd/system-generators/systemd-$generator-generator"
done

chroot "$tree" systemctl set-default --quiet multi-user.target
chroot "$tree" systemctl enable --quiet \
    provisioner-boot.service provisioner-clock.service provisioner-exec.service ssh.service
chroot "$tree" systemctl disable --quiet systemd-networkd.service systemd-networkd.socket
# Nothing but the task runs on its own, and the boot waits for nothing that a short-lived machine
# does not need: on an emulated machine each of these takes a good part of a second.
chroot "$tree" systemctl mask --quiet \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    systemd-networkd-wait-online.service systemd-timesyncd.service systemd-pstore.service resolvconf.service \
    getty-static.service getty.target console-getty.service serial-getty@.service \
    systemd-binfmt.service proc-sys-fs-binfmt_misc.automount dev-hugepages.mount dev-mqueue.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount \
    modprobe@configfs.service modprobe@dm_mod.service modprobe@fuse.service modprobe@loop.service \
    modprobe@drm.service modprobe@efi_pstore.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-random-seed.service \
    systemd-machine-id-commit.service systemd-firstboot.service systemd-network-generator.service \
    systemd-sysusers.service systemd-remount-fs.service systemd-journal-flush.service kmod-static-nodes.service \
    systemd-user-sessions.service ldconfig.service systemd-hwdb-update.service systemd-update-done.service \
    systemd-journal-catalog-update.service systemd-hibernate-clear.service
# That would let users log in; without this file, nothing forbids it.
ln -s /dev/null "$tree/etc/tmpfiles.d/systemd-nologin.conf"
