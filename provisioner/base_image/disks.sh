#!/bin/sh
# Creates the disks of the base images from mmdebstrap's tree: that of the primary machine, and aux if it is named.
# Runs as root, or as root of a user namespace. Usage: disks.sh TREE_TAR OUTPUT SIZE_GIB ROLE...
set -eu
tar=$1 output=$2 size=$3
shift 3
roles=$*
scripts=$(dirname "$0")
work=$(mktemp -d "$output/tree.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP
tree=$work/root
mkdir "$tree"
# The kernel fills /dev, and root of a user namespace may not create device nodes.
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

# An aux VM is a plain Debian machine, without the Python of families and the limits of the agent.
aux() {
    guest=$tree/usr/lib/provisioner/guest
    cp -a "$tree/etc" "$work/etc"
    cp -a "$guest/agent_cgroup.sh" "$work/"
    mkdir "$work/local"
    for directory in bin include lib; do
        mv "$tree/usr/local/$directory" "$work/local/"
        mkdir -m 0755 "$tree/usr/local/$directory"
    done
    sh "$scripts/users.sh" "$tree" aux
    disk aux
    for directory in bin include lib; do
        rmdir "$tree/usr/local/$directory"
        mv "$work/local/$directory" "$tree/usr/local/"
    done
    mv "$work/agent_cgroup.sh" "$guest/"
    rm -rf "${tree:?}/home/admin" "${tree:?}/var/mail/admin" "${tree:?}/etc"
    mv "$work/etc" "$tree/etc"
}
case " $roles " in *" aux "*) aux ;; esac

sh "$scripts/users.sh" "$tree" primary
disk primary
