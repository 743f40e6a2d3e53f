#!/bin/sh
# Installs Docker and builds the container's image from Debian packages: no container registry is needed.
# Runs as root when the aux VM's image is built.
set -eu
export DEBIAN_FRONTEND=noninteractive

# The container shares the VM's network, so Docker needs neither a bridge nor firewall rules of its own.
mkdir -p /etc/docker
printf '{"bridge": "none", "iptables": false, "ip6tables": false}\n' > /etc/docker/daemon.json
packages='docker.io busybox-static dropbear-bin'
# shellcheck disable=SC2086 # one word per package
apt-get install -y --no-install-recommends $packages ||
    { apt-get update && apt-get install -y --no-install-recommends $packages; }

tree=$(mktemp -d)
mkdir -p "$tree/bin" "$tree/sbin" "$tree/root/.ssh" "$tree/etc/dropbear" \
    "$tree/dev" "$tree/proc" "$tree/sys" "$tree/tmp" "$tree/mnt"
chmod 0755 "$tree"
chmod 0700 "$tree/root" "$tree/root/.ssh"
cp /usr/bin/busybox "$tree/bin/busybox"
chroot "$tree" /bin/busybox --install -s /bin
cp /usr/sbin/dropbear "$tree/sbin/"
# The libraries that the SSH server needs, as ldd names them.
ldd /usr/sbin/dropbear | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$tree$(dirname "$library")"
    cp -L "$library" "$tree$library"
done
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
printf 'root:x:0:\n' > "$tree/etc/group"
printf '/bin/sh\n' > "$tree/etc/shells"

tar -C "$tree" -c . | docker import - target
rm -rf "$tree"
apt-get clean
