#!/bin/sh
# Removes from a disk what belongs to the builder, before it becomes an image. What the family made stays.
# Usage: seal.sh TREE KEY   KEY: the public key that opened the builder
set -eu
tree=${1%/}
# An authorized_keys file may have options before the key, and another comment after it.
key=$(printf '%s\n' "$2" | cut -d ' ' -f 2)
[ -n "$key" ]

# cloud-init adds the key to root's own.
for file in "$tree"/root/.ssh/authorized_keys* "$tree"/home/*/.ssh/authorized_keys*; do
    [ -f "$file" ] || continue
    kept=$(grep -vF -- "$key" "$file") || true
    if [ -n "$kept" ]; then printf '%s\n' "$kept" > "$file"; else rm -f "$file"; fi
done
rm -rf "$tree/etc/ssh/authorized_keys.d" "$tree"/etc/ssh/ssh_host_*
rm -rf "$tree/var/lib/provisioner" "$tree/var/lib/provisioner-ttl" "$tree/run/provisioner" "$tree/root/.cache/pip"
rm -f "$tree"/root/.bash_history "$tree"/home/*/.bash_history "$tree"/root/.python_history

# What a builder does instead of cloud-init after a reboot (hardening.py).
rm -f "$tree/etc/cloud/cloud-init.disabled" "$tree/etc/systemd/system/provisioner-later-boots.service" \
    "$tree/etc/systemd/system/multi-user.target.wants/provisioner-later-boots.service"

# What cloud-init was told, user data included, and what it did. A seed that is a link belongs to the vendor's image.
for name in instance instances data sem; do rm -rf "$tree/var/lib/cloud/$name"; done
if [ -d "$tree/var/lib/cloud/seed" ]; then find "$tree/var/lib/cloud/seed" -type f -delete; fi
rm -rf "$tree"/var/log/cloud-init* "$tree"/var/log/journal/* "$tree"/var/log/apt/*
rm -f "$tree"/var/log/dpkg.log "$tree"/var/log/auth.log* "$tree"/var/log/syslog* "$tree"/var/log/wtmp \
    "$tree"/var/log/btmp "$tree"/var/log/lastlog

# Each machine has its own.
: > "$tree/etc/machine-id"
if [ ! -L "$tree/var/lib/dbus/machine-id" ]; then rm -f "$tree/var/lib/dbus/machine-id"; fi
rm -f "$tree/var/lib/systemd/random-seed" "$tree/var/lib/systemd/credential.secret" "$tree"/var/lib/dhcp/*.leases
