#!/bin/sh
# Runs once per boot, before anything that may listen or reach out: waits for the controller's settings, the credentials,
# one file each, and applies them. Uses `ip` and not a network daemon, since all addresses are known and a daemon takes
# seconds without KVM.
set -eu

credentials=/run/provisioner-credentials
given() { [ -s "$credentials/$1" ]; }
said() { cat "$credentials/$1"; }

# The journal is named after the machine's id, which is still to come. The first that has something to say starts it again.
systemctl stop systemd-journald.service
rm -rf /run/log/journal/*

# What is still to do for devices would be done again in each machine that goes on from here.
udevadm settle --timeout=20 || :

# The machine may be frozen here, and started as many others.
perl /usr/lib/provisioner/credentials.pl "$credentials"

said machine_id > /etc/machine-id
# A message that came before it was frozen may have started the journal again, under an id that all would share.
for journal in /run/log/journal/*; do
    if [ -e "$journal" ]; then
        systemctl stop systemd-journald.service
        rm -rf /run/log/journal/*
        break
    fi
done

# Set the timer first, so that the machine ends whatever else goes wrong.
if given expires_at; then
    sh /usr/lib/provisioner/guest/ttl.sh "$(said expires_at)"
fi

# Prints the interface with the MAC address $1, if there is one.
interface() {
    for device in /sys/class/net/*; do
        read -r address < "$device/address" || continue
        if [ "$address" = "$1" ]; then
            echo "${device##*/}"
            return
        fi
    done
}

# Notes that the interface with the MAC address $1 gets the IPv4 address $2. No IPv6 anywhere.
up() {
    name=$(interface "$1")
    if [ -z "$name" ]; then
        echo "provisioner: no network card $1" >&2
        return 1
    fi
    echo 1 > "/proc/sys/net/ipv6/conf/$name/disable_ipv6"
    links="$links
link set $name up
address replace $2 dev $name"
}

links='link set lo up'
up 52:54:00:00:00:01 10.0.2.15/24
if given private_address; then
    up 52:54:00:00:00:02 "$(said private_address)"
fi
# "ADDRESS GATEWAY": only set if the machine may reach something outside.
if given internet; then
    read -r address gateway < "$credentials/internet"
    up 52:54:00:00:00:03 "$address/32"
    links="$links
route replace default via $gateway dev $name onlink"
fi
printf '%s\n' "$links" | ip -batch -
if given resolver; then
    printf 'nameserver %s\n' "$(said resolver)" > /etc/resolv.conf
else
    : > /etc/resolv.conf
fi

if given hostname; then
    said hostname > /etc/hostname
    said hostname > /proc/sys/kernel/hostname
fi
if given hosts; then
    said hosts > /etc/hosts
fi
mkdir -p /etc/ssh/authorized_keys.d
(cd /etc/ssh && rm -f ssh_host_* authorized_keys.d/root authorized_keys.d/agent authorized_keys.d/admin)
if given host_key; then
    (umask 077 && said host_key > /etc/ssh/ssh_host_ed25519_key)
fi
while IFS=: read -r user _; do
    if given "authorized_keys.$user"; then
        said "authorized_keys.$user" > "/etc/ssh/authorized_keys.d/$user"
    fi
done < /etc/passwd
# Grow the file system if the disk is larger than the image's. `grow` is the disk's size in sectors of 512 bytes: that of
# a machine that was frozen grows a moment after it has started.
if given grow; then
    tries=250
    until read -r size < /sys/class/block/vda/size && [ "$size" -ge "$(said grow)" ] || [ $tries = 0 ]; do
        sleep 0.02
        tries=$((tries - 1))
    done
    /lib/systemd/systemd-growfs /
fi
rm -rf "$credentials"
