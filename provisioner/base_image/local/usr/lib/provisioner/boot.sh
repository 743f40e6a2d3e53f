#!/bin/sh
# Runs once per boot, before anything that may listen or reach out: waits for the controller's settings, the credentials,
# one file each, and applies them. Uses `ip` and not a network daemon, since all addresses are known and a daemon takes
# seconds without KVM. There each process takes a twentieth of a second, so the shell itself does what it can.
set -eu

credentials=/run/provisioner-credentials
given() { [ -s "$credentials/$1" ]; }
# Reads a credential of one line into $value.
get() { IFS= read -r value < "$credentials/$1" || [ -n "$value" ]; }
# Prints a credential.
print() {
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s\n' "$line"
    done < "$credentials/$1"
}

# The journal is named after the machine's id, which comes with the credentials. The first message starts it again.
systemctl stop systemd-journald.service
rm -rf /run/log/journal/*

# Finish the work on devices now: otherwise each machine that starts from a template made here would repeat it.
udevadm settle --timeout=20 || :

# The machine may be frozen here, and started as many others.
perl /usr/lib/provisioner/credentials.pl "$credentials"

print machine_id > /etc/machine-id
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
    get expires_at
    sh /usr/lib/provisioner/guest/ttl.sh "$value"
fi

# Notes that the interface with the MAC address $1 gets the IPv4 address $2 and, if it is given, the MAC address $3.
# No IPv6 anywhere.
up() {
    name=
    for device in /sys/class/net/*; do
        read -r address < "$device/address" || continue
        if [ "$address" = "$1" ]; then name=${device##*/}; fi
    done
    if [ -z "$name" ]; then
        echo "provisioner: no network card $1" >&2
        return 1
    fi
    echo 1 > "/proc/sys/net/ipv6/conf/$name/disable_ipv6"
    links="$links${3:+
link set $name address $3}
link set $name up
address replace $2 dev $name"
}

links='link set lo up'
up 52:54:00:00:00:01 10.0.2.15/24
if given private_address; then
    get link_mac
    mac=$value
    get private_address
    up 52:54:00:00:00:02 "$value" "$mac"
fi
# "ADDRESS GATEWAY": only set if the machine may reach something outside.
if given internet; then
    read -r internet gateway < "$credentials/internet" || [ -n "$gateway" ]
    up 52:54:00:00:00:03 "$internet/32"
    links="$links
route replace default via $gateway dev $name onlink"
fi
printf '%s\n' "$links" | ip -batch -
if given resolver; then
    get resolver
    printf 'nameserver %s\n' "$value" > /etc/resolv.conf
else
    : > /etc/resolv.conf
fi

if given hostname; then
    get hostname
    printf '%s\n' "$value" > /etc/hostname
    printf '%s\n' "$value" > /proc/sys/kernel/hostname
fi
if given hosts; then
    print hosts > /etc/hosts
fi
# Remove the keys of an earlier boot.
for key in /etc/ssh/ssh_host_* /etc/ssh/authorized_keys.d/root /etc/ssh/authorized_keys.d/agent \
    /etc/ssh/authorized_keys.d/admin; do
    if [ -e "$key" ] || [ -L "$key" ]; then rm -f "$key"; fi
done
[ -d /etc/ssh/authorized_keys.d ] || mkdir -p /etc/ssh/authorized_keys.d
if given host_key; then
    umask 077
    print host_key > /etc/ssh/ssh_host_ed25519_key
    umask 022
fi
for user in root agent admin; do
    if given "authorized_keys.$user"; then
        print "authorized_keys.$user" > "/etc/ssh/authorized_keys.d/$user"
    fi
done
# Grow the file system if the disk is larger than the image's. `grow` is the disk's size in sectors of 512 bytes: that of
# a machine that was frozen grows a moment after it has started.
if given grow; then
    tries=250
    get grow
    until read -r size < /sys/class/block/vda/size && [ "$size" -ge "$value" ] || [ $tries = 0 ]; do
        sleep 0.02
        tries=$((tries - 1))
    done
    /lib/systemd/systemd-growfs /
fi
rm -rf "$credentials"
