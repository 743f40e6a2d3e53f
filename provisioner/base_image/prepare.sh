#!/bin/sh
# Turns a vendor's running Debian or Ubuntu into the base image of a role.
# Usage: prepare.sh ROLE DIRECTORY PACKAGE...   DIRECTORY contains rootfs/, guest/ and optionally ca.pem
set -eu
role=$1 directory=$2
shift 2
export DEBIAN_FRONTEND=noninteractive
# From here on for what this script says; for all that the image does, see below.
sysctl -q -w net.ipv4.tcp_mtu_probing=1

bundle=$directory/ca.pem
[ -s "$bundle" ] || bundle=
# Wait for cloud-init and apt's timers, which may be installing packages. For the lock of the package lists apt-get does
# not wait by itself.
tries=0
until said=$(LC_ALL=C apt-get -q update 2>&1); do
    printf '%s\n' "$said"
    case $said in
    *"Could not get lock"*) tries=$((tries + 1)) ;;
    *) exit 100 ;;
    esac
    if [ "$tries" = 24 ]; then exit 100; fi
    sleep 5
done
printf '%s\n' "$said"
apt-get -o DPkg::Lock::Timeout=120 -q install -y --no-install-recommends "$@"
sh "$directory/common.sh" / "$directory/rootfs" "$directory/guest" ${bundle:+"$bundle"}
sh "$directory/runtime.sh" /
if [ "$role" = primary ]; then sh "$directory/family_python.sh" / "$directory/python"; fi
sh "$directory/users.sh" / "$role"
# What follows in this builder is done by the server that the image has.
systemctl daemon-reload
systemctl enable --quiet --now provisioner-exec.service
# Nothing but the task runs on its own.
systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service
# No IPv6 anywhere. And no ICMP comes in from outside, so that TCP itself has to find out what is too large for the path
# (EC2's cards send packets of 9001 bytes).
cat > /etc/sysctl.d/90-provisioner.conf << 'EOF'
net.ipv6.conf.all.disable_ipv6 = 1
net.ipv6.conf.default.disable_ipv6 = 1
net.ipv4.tcp_mtu_probing = 1
EOF
