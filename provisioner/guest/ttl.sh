#!/bin/sh
# Powers this machine off at the end of its time to live, whatever is running in it then.
# Usage: ttl.sh SECONDS [move]   SECONDS since the epoch. Each boot calls it with the original time. `move` sets another
# time, which later boots use as well.
set -eu
moved=/var/lib/provisioner-ttl

set_timer() {
    systemd-run --quiet --collect --unit=provisioner-ttl --on-active="$1" --timer-property=AccuracySec=1s \
        systemctl poweroff --force
}

if [ "${2:-}" = move ]; then
    echo "$1" > "$moved"
fi
expiry=$1
if [ -s "$moved" ]; then
    expiry=$(cat "$moved")
fi
left=$((expiry - $(date +%s)))
if [ "$left" -lt 1 ]; then
    left=1
fi
if [ "${2:-}" = move ]; then
    systemctl stop provisioner-ttl.timer 2> /dev/null || :
    set_timer "$left"
else
    # In the background: the timer starts only after units of this boot that wait for this script.
    set_timer "$left" < /dev/null > /dev/null 2>&1 &
fi
