#!/bin/sh
# Installs the Python of families in /usr/local, and our package metr_task_standard for it.
# Usage: family_python.sh TREE SOURCES
set -eu
tree=${1%/} sources=$2
work=$tree/run/provisioner-python
mkdir -p "$work"
cp "$sources/install.py" "$sources/main.c" "$work/"
chroot "$tree/" /usr/bin/python3 -I /run/provisioner-python/install.py /usr/lib/provisioner/guest
rm -rf "$work"
grep -v '^#' "$sources/packages.txt" | DEBIAN_FRONTEND=noninteractive \
    xargs chroot "$tree/" apt-get -qq -o DPkg::Options::=--force-unsafe-io purge --auto-remove -y
