#!/bin/sh
# Makes the AMI's disk, kernel and initrd from the tree that mmdebstrap wrote.
# Runs as root, or as root of a user namespace. Usage: disk.sh TREE_TAR OUTPUT SIZE_GIB
set -eu
tar=$1 output=$2 size=$3
tree=$(mktemp -d "$output/tree.XXXXXX")
trap 'rm -rf "$tree"' EXIT
trap 'exit 1' INT TERM HUP
chmod 0755 "$tree"
# The kernel fills /dev; a user namespace's root may not make device nodes.
tar -xf "$tar" -C "$tree" --numeric-owner --exclude='./dev/*'
mv "$tree"/boot/vmlinuz-* "$output/vmlinuz"
mv "$tree"/boot/initrd.img-* "$output/initrd.img"
rm -f "$tree/vmlinuz" "$tree/vmlinuz.old" "$tree/initrd.img" "$tree/initrd.img.old"
chmod 0644 "$output/vmlinuz" "$output/initrd.img"
truncate -s "${size}G" "$output/disk.raw"
mke2fs -q -t ext4 -F -m 1 -L root -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0 -d "$tree" "$output/disk.raw"
