#!/bin/sh
# mmdebstrap's customize hook: turns a plain Debian 12 tree into the stand-in for Debian's AMI.
# Usage: customize.sh TREE FILES [CA_BUNDLE]
set -eu
tree=$1 files=$2 ca_bundle=${3:-}

mkdir -p "$tree/usr/share/quick-first-boot" "$tree/etc/netplan"
cp --no-preserve=ownership,mode "$files/quick.cfg" "$tree/usr/share/quick-first-boot/cloud.cfg"
cp --no-preserve=ownership,mode "$files/01_debian_cloud.cfg" "$tree/etc/cloud/cloud.cfg.d/"
cp --no-preserve=ownership,mode "$files/90-default.yaml" "$tree/etc/netplan/"
chmod 0600 "$tree/etc/netplan/90-default.yaml"
cp --no-preserve=ownership,mode "$files"/*.service "$tree/etc/systemd/system/"
# In a quick boot, cloud-init finds user data, metadata and network configuration where systemd puts SMBIOS's strings.
mkdir -p "$tree/var/lib/cloud/seed"
ln -s /run/credentials/@system "$tree/var/lib/cloud/seed/nocloud"

# As in the tree's own lists, which an update then finds as they are; what apt makes of them is made here, where it is
# quick.
printf 'Acquire::Languages "none";\n' > "$tree/etc/apt/apt.conf.d/99languages"
chroot "$tree" apt-cache gencaches > /dev/null
rm -f "$tree"/var/cache/apt/archives/*.deb

rm -f "$tree"/etc/ssh/ssh_host_*
: > "$tree/etc/fstab"
printf 'localhost\n' > "$tree/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost\n' > "$tree/etc/hosts"
: > "$tree/etc/machine-id"
ln -sf ../run/systemd/resolve/stub-resolv.conf "$tree/etc/resolv.conf"
# Found before udev would: the network is up earlier.
printf 'virtio_net\n' > "$tree/etc/modules-load.d/ec2.conf"
printf 'UseDNS no\nPrintMotd no\nPrintLastLog no\n' > "$tree/etc/ssh/sshd_config.d/ec2.conf"
# ping's capability gets lost on the way into the disk.
printf 'net.ipv4.ping_group_range = 0 2147483647\n' > "$tree/etc/sysctl.d/ping.conf"
# Families expect /tmp to be kept over a restart of an image's machine.
mkdir -p "$tree/etc/tmpfiles.d"
printf 'd /tmp 1777 root root -\nd /var/tmp 1777 root root -\n' > "$tree/etc/tmpfiles.d/tmp.conf"

if [ -n "$ca_bundle" ]; then
    mkdir -p "$tree/usr/local/share/ca-certificates/host"
    # Only those that Debian does not know: each takes a good part of a second when a machine hashes them again.
    awk -v dir="$tree/usr/local/share/ca-certificates/host" '
        /-----BEGIN CERTIFICATE-----/ { lines = ""; inside = 1 }
        inside { lines = lines $0 "\n" }
        /-----END CERTIFICATE-----/ {
            if (extra && !(lines in known)) printf "%s", lines > (dir "/extra-" ++n ".crt")
            known[lines] = 1
            inside = 0
        }
    ' "$tree/etc/ssl/certs/ca-certificates.crt" extra=1 "$ca_bundle"
    chroot "$tree" update-ca-certificates > /dev/null 2>&1
    for name in SSL_CERT_FILE PIP_CERT REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS; do
        printf '%s=/etc/ssl/certs/ca-certificates.crt\n' "$name"
    done >> "$tree/etc/environment"
fi

# The kernel and its initramfs lie beside the disk.
printf 'update_initramfs=no\n' > "$tree/etc/initramfs-tools/update-initramfs.conf"

# What these look for is not here.
mkdir -p "$tree/etc/systemd/system-generators"
for generator in cryptsetup getty gpt-auto hibernate-resume integritysetup run system-update veritysetup; do
    ln -s /dev/null "$tree/etc/systemd/system-generators/systemd-$generator-generator"
done

chroot "$tree" systemctl set-default --quiet multi-user.target
chroot "$tree" systemctl enable --quiet ssh.service systemd-networkd.service \
    systemd-resolved.service power-button.service quick-first-boot.service
# Docker starts when it is first asked for.
chroot "$tree" systemctl disable --quiet docker.service containerd.service
chroot "$tree" systemctl enable --quiet docker.socket
# Nothing runs by itself, and boot waits for nothing that a throw-away machine does not need.
chroot "$tree" systemctl mask --quiet \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    systemd-timesyncd.service systemd-pstore.service \
    getty-static.service getty.target console-getty.service serial-getty@.service \
    systemd-binfmt.service proc-sys-fs-binfmt_misc.automount dev-hugepages.mount dev-mqueue.mount \
    sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount \
    modprobe@configfs.service modprobe@dm_mod.service modprobe@fuse.service modprobe@loop.service \
    modprobe@drm.service modprobe@efi_pstore.service \
    systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-random-seed.service \
    systemd-machine-id-commit.service systemd-firstboot.service systemd-network-generator.service \
    systemd-remount-fs.service systemd-journal-flush.service kmod-static-nodes.service \
    cloud-init-hotplugd.socket cloud-init-hotplugd.service
