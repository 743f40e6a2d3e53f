#!/bin/sh
# Builds the container's image from Debian packages: no container registry is needed.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends docker.io busybox-static dropbear-bin
tree=$(mktemp -d)
mkdir -p "$tree/bin" "$tree/sbin" "$tree/root" "$tree/etc/dropbear" "$tree/dev" "$tree/proc" "$tree/sys" "$tree/tmp" "$tree/mnt"
cp /usr/bin/busybox "$tree/bin/busybox"
for name in $("$tree/bin/busybox" --list); do ln -sf busybox "$tree/bin/$name"; done
cp /usr/sbin/dropbear "$tree/sbin/"
# The SSH server and the libraries that it needs, as ldd names them.
ldd /usr/sbin/dropbear | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$tree$(dirname "$library")"
    cp -L "$library" "$tree$library"
done
for library in /lib/x86_64-linux-gnu/libnss_files.so.2 /lib/x86_64-linux-gnu/libnss_compat.so.2; do
    [ ! -e "$library" ] || { mkdir -p "$tree$(dirname "$library")"; cp -L "$library" "$tree$library"; }
done
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
printf 'root:x:0:\n' > "$tree/etc/group"
printf '/bin/sh\n' > "$tree/etc/shells"
cat > "$tree/start" <<'START'
#!/bin/sh
mkdir -p /root/.ssh
echo "$KEY" > /root/.ssh/authorized_keys
chmod 700 /root /root/.ssh
chmod 600 /root/.ssh/authorized_keys
exec /sbin/dropbear -F -E -R -s -p 2222
START
chmod 755 "$tree/start"
tar -C "$tree" -c . | docker import - target
rm -rf "$tree"
systemctl enable docker.service containerd.service
