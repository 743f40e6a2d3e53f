#!/bin/sh
# Makes the two disks of the base image from the tree that mmdebstrap wrote.
# Runs as root, or as root of a user namespace. Usage: disks.sh TREE_TAR OUTPUT SIZE_GIB
set -eu
tar=$1 output=$2 size=$3
work=$(mktemp -d "$output/tree.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP
tree=$work/root
mkdir "$tree"
# The kernel fills /dev; a user namespace's root may not make device nodes.
tar -xf "$tar" -C "$tree" --numeric-owner --exclude='./dev/*'

mv "$tree"/boot/vmlinuz-* "$output/vmlinuz"
mv "$tree"/boot/initrd.img-* "$output/initrd.img"
rm -f "$tree/vmlinuz" "$tree/vmlinuz.old" "$tree/initrd.img" "$tree/initrd.img.old"
chmod 0644 "$output/vmlinuz" "$output/initrd.img"

disk() {
    truncate -s "${size}G" "$output/$1.raw"
    mke2fs -q -t ext4 -F -m 1 -L root -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0 \
        -d "$tree" "$output/$1.raw"
}

cp -a "$tree/etc" "$work/etc"

# An aux VM is a plain Debian machine with the cloud image's user (Task Standard, VMSpec).
chroot "$tree" useradd --create-home --shell /bin/bash --uid 1001 admin
printf 'admin ALL=(ALL) NOPASSWD:ALL\n' > "$tree/etc/sudoers.d/admin"
chmod 0440 "$tree/etc/sudoers.d/admin"
disk aux

rm -rf "${tree:?}/home/admin" "${tree:?}/var/mail/admin" "${tree:?}/etc"
mv "$work/etc" "$tree/etc"

# A primary machine, as the Task Standard's Dockerfile leaves it.
chroot "$tree" groupadd --system protected
chroot "$tree" useradd --create-home --shell /bin/bash --uid 1000 agent
chmod 0755 "$tree/home/agent"
mkdir "$tree/protected"
: > "$tree/protected/score.log"
chroot "$tree" chown -R root:protected /protected
chmod 0750 "$tree/protected"
chmod 0620 "$tree/protected/score.log"
chmod 0700 "$tree/root"
disk primary
