#!/bin/sh
# Creates a machine's user, in a directory tree or, if TREE is /, on the running machine. The agent's limits are the
# primary machine's alone: a user of that name whom a family makes on its aux VM has none of them.
# Usage: users.sh TREE ROLE
set -eu
tree=$1 role=$2

# The vendor's user has keys to log in with and, on a primary machine, the uid of ours.
for user in admin ubuntu debian; do
    rm -f "$tree/etc/sudoers.d/$user" "$tree/home/$user/.ssh/authorized_keys"
    if [ "$role" = primary ] && grep -q "^$user:" "$tree/etc/passwd"; then
        chroot "$tree" userdel --force --remove "$user" 2> /dev/null
    fi
done
rm -f "$tree/etc/sudoers.d/90-cloud-init-users"

if [ "$role" = aux ]; then
    # The user of the distribution's own cloud image (Task Standard, VMSpec), which may have it already.
    user="admin"
    if grep -q '^ID=ubuntu$' "$tree/etc/os-release"; then user="ubuntu"; fi
    if ! grep -q "^$user:" "$tree/etc/passwd"; then
        chroot "$tree" useradd --create-home --shell /bin/bash --uid 1001 "$user"
    fi
    printf '%s ALL=(ALL) NOPASSWD:ALL\n' "$user" > "$tree/etc/sudoers.d/$user"
    chmod 0440 "$tree/etc/sudoers.d/$user"
    # Without it, the exec server gives commands of that user no other limits than other users'.
    rm "$tree/usr/lib/provisioner/guest/agent_cgroup.sh"
    exit
fi
# A primary machine is set up as by the Task Standard's Dockerfile.
chroot "$tree" groupadd --system protected
chroot "$tree" useradd --create-home --shell /bin/bash --uid 1000 agent
chmod 0755 "$tree/home/agent"
# Logins as agent count towards the limits of the agent's cgroup.
cp -R --no-preserve=ownership,mode "$(dirname "$0")/primary/." "$tree/"
DEBIAN_FRONTEND=noninteractive chroot "$tree" pam-auth-update --package
# A service manager of the agent's own would start processes outside its cgroup, where logind is installed.
mkdir -p "$tree/etc/systemd/system"
ln -sf /dev/null "$tree/etc/systemd/system/user@1000.service"
mkdir "$tree/protected"
: > "$tree/protected/score.log"
chroot "$tree" chown -R root:protected /protected
chmod 0750 "$tree/protected"
chmod 0620 "$tree/protected/score.log"
chmod 0700 "$tree/root"
