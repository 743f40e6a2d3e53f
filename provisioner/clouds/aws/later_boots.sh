#!/bin/sh
# Prepares a machine for later boots. With the metadata service off, cloud-init would take one for that of a new machine:
# it would make new host keys and its vendor's user, who may become root, and forget the time to live. So it runs once
# (cloud-init's documentation, "Disable cloud-init"), and a unit does what must be done at each boot. seal.sh removes
# both.
# Usage: later_boots.sh EXPIRY < ttl.sh
set -eu
umask 077
mkdir -p /var/lib/provisioner /etc/systemd/system/multi-user.target.wants
cat > /var/lib/provisioner/ttl.sh
cat > /etc/systemd/system/provisioner-later-boots.service <<END
[Unit]
Description=Set the timer that ends this machine
ConditionPathExists=/var/lib/provisioner/ttl.sh

[Service]
Type=oneshot
RemainAfterExit=yes
KillMode=process
ExecStart=/bin/sh /var/lib/provisioner/ttl.sh $1
END
ln -sf ../provisioner-later-boots.service /etc/systemd/system/multi-user.target.wants/
touch /etc/cloud/cloud-init.disabled
