#!/bin/sh
# Creates a machine's user, in a directory tree or, if TREE is /, on the running machine. Usage: users.sh TREE ROLE
set -eu
tree=$1 role=$2

if [ "$role" = aux ]; then
    # An aux VM is a plain Debian machine with the cloud image's user (Task Standard, VMSpec).
    chroot "$tree" useradd --create-home --shell /bin/bash --uid 1001 admin
    printf 'admin ALL=(ALL) NOPASSWD:ALL\n' > "$tree/etc/sudoers.d/admin"
    chmod 0440 "$tree/etc/sudoers.d/admin"
    exit
fi
# A primary machine is set up as by the Task Standard's Dockerfile.
chroot "$tree" groupadd --system protected
chroot "$tree" useradd --create-home --shell /bin/bash --uid 1000 agent
chmod 0755 "$tree/home/agent"
# A service manager of the agent's own would start processes outside its cgroup, where logind is installed.
mkdir -p "$tree/etc/systemd/system"
ln -sf /dev/null "$tree/etc/systemd/system/user@1000.service"
mkdir "$tree/protected"
: > "$tree/protected/score.log"
chroot "$tree" chown -R root:protected /protected
chmod 0750 "$tree/protected"
chmod 0620 "$tree/protected/score.log"
chmod 0700 "$tree/root"
