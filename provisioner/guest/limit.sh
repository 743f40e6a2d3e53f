#!/bin/sh
# Powers this machine off at a moment, whatever runs in it then.
# Usage: limit.sh SECONDS [move]   since the epoch. Called at each boot with the first limit; with `move` where the
# operator moves it, which later boots then know.
set -eu
moved=/var/lib/provisioner-limit

set_timer() {
    systemd-run --quiet --collect --unit=provisioner-limit --on-active="$1" --timer-property=AccuracySec=1s \
        systemctl poweroff --force
}

if [ "${2:-}" = move ]; then
    echo "$1" > "$moved"
fi
limit=$1
if [ -s "$moved" ]; then
    limit=$(cat "$moved")
fi
left=$((limit - $(date +%s)))
if [ "$left" -lt 1 ]; then
    left=1
fi
if [ "${2:-}" = move ]; then
    systemctl stop provisioner-limit.timer 2> /dev/null || :
    set_timer "$left"
else
    # Not waited for: the timer starts after what this boot waits for, and that after us.
    set_timer "$left" < /dev/null > /dev/null 2>&1 &
fi
