#!/bin/sh
# Installs what every base image has on any cloud: the driver's program, sshd's settings and CA certificates.
# Works on a directory tree, or on the running machine if TREE is /.
# Usage: common.sh TREE FILES GUEST [CA_BUNDLE]
set -eu
tree=$1 files=$2 guest=$3 ca_bundle=${4:-}

cp -R --no-preserve=ownership,mode "$files/." "$tree/"
mkdir -p "$tree/usr/lib/provisioner/guest"
cp -R --no-preserve=ownership,mode "$guest/." "$tree/usr/lib/provisioner/guest/"
# The controller sends the texts of sent/ with each call.
rm -rf "$tree/usr/lib/provisioner/guest/sent"
find "$tree/usr/lib/provisioner/guest" -name __pycache__ -prune -exec rm -rf {} +
# The agent must not read the driver's program. It may run the interpreter (runtime.sh), which copies its files.
chmod 0711 "$tree/usr/lib/provisioner"
chmod 0700 "$tree/usr/lib/provisioner/guest"
# The message of the day: each login would run the programs of /etc/update-motd.d, a quarter of a second without KVM.
# The programs are kept, since build steps change them. /etc/motd is still shown.
sed -i 's|^session.*pam_motd\.so.*motd=/run/motd\.dynamic|# &|' "$tree/etc/pam.d/sshd"
# Inodes that are freed before scoring, should the agent have used up all others.
mkdir -p "$tree/usr/lib/provisioner/inodes"
chmod 0700 "$tree/usr/lib/provisioner/inodes"
(cd "$tree/usr/lib/provisioner/inodes" && seq 1000 | xargs touch)
rm -f "$tree"/etc/ssh/ssh_host_*
# Since 9.8, OpenSSH shuts an address out for a while if logins from it fail. An agent could use that to shut out the
# controller, which reaches an aux VM from the primary machine's address.
if grep -q -i -a persourcepenalties "$tree/usr/sbin/sshd"; then
    printf 'PerSourcePenalties no\n' > "$tree/etc/ssh/sshd_config.d/provisioner-penalties.conf"
fi
# What Debian 13 has besides. Files that install() wrote to /tmp are to exist at start(), so that is not in memory; the
# controller gives each machine its host key; and sshd listens nowhere else, as on a Unix socket or to the host.
mkdir -p "$tree/etc/systemd/system" "$tree/etc/systemd/system-generators"
for unit in system/tmp.mount system/sshd-keygen.service system-generators/systemd-ssh-generator; do
    ln -sf /dev/null "$tree/etc/systemd/$unit"
done
# Let Debian's own pip install, too: an aux VM has no other Python.
find "$tree/usr/lib" -name EXTERNALLY-MANAGED -delete

if [ -n "$ca_bundle" ]; then
    mkdir -p "$tree/usr/local/share/ca-certificates/provisioner"
    # update-ca-certificates needs one certificate per file. Debian has most of a host's bundle already: leave those out,
    # since each takes a good part of a second on an emulated machine.
    awk -v dir="$tree/usr/local/share/ca-certificates/provisioner" '
        /-----BEGIN CERTIFICATE-----/ { lines = body = ""; inside = 1 }
        inside { lines = lines $0 "\n"; sub(/\r$/, ""); body = body $0 }
        /-----END CERTIFICATE-----/ {
            if (extra && !(body in known)) {
                file = sprintf("%s/extra-%04d.crt", dir, ++n)
                printf "%s", lines > file
                close(file)
            }
            known[body] = 1
            inside = 0
        }
    ' "$tree/etc/ssl/certs/ca-certificates.crt" extra=1 "$ca_bundle"
    if [ -n "$(find "$tree/usr/local/share/ca-certificates/provisioner" -type f)" ]; then
        chroot "$tree" update-ca-certificates > /dev/null 2>&1
    fi
    # By default pip and requests use their own certificates.
    for name in SSL_CERT_FILE PIP_CERT REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS; do
        printf '%s=/etc/ssl/certs/ca-certificates.crt\n' "$name"
    done >> "$tree/etc/environment"
fi
