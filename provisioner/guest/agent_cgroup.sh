#!/bin/sh
# Keeps everything that the agent starts in one cgroup, whose limits leave root room to score.
# Usage: agent_cgroup.sh login | join PART PID | kill PART | reopen
#   login       moves the login that PAM is opening into the part `logins`: sshd, cron and at log in as agent
#   join, kill  moves a process into a part of the cgroup; ends all processes of a part
#   reopen      lets logins in again, after agent_end.py has ended them
set -eu
# Neither what a family has installed in /usr/local, nor what PAM passes on.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cgroup=/sys/fs/cgroup/agent

# Creates the cgroup and sets its limits. What an agent writes to /dev/shm counts as its memory.
open_cgroup() {
    echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
    mkdir -p "$cgroup"
    read -r _ total _ < /proc/meminfo # in KiB
    reserve=$((total / 10))
    if [ "$reserve" -lt 196608 ]; then reserve=196608; fi
    if [ "$reserve" -gt $((total / 2)) ]; then reserve=$((total / 2)); fi
    echo $(((total - reserve) * 1024)) > "$cgroup/memory.max"
    if [ -e "$cgroup/memory.swap.max" ]; then echo 0 > "$cgroup/memory.swap.max"; fi
    # A quarter of what root's share is, when both want the processor.
    echo 25 > "$cgroup/cpu.weight"
    tasks=$(cat /proc/sys/kernel/threads-max)
    pids=$(cat /proc/sys/kernel/pid_max)
    if [ "$tasks" -gt "$pids" ]; then tasks=$pids; fi
    echo $((tasks / 2)) > "$cgroup/pids.max"
    mkdir -p "$cgroup/logins" # last: it says that the limits are set
}

join() {
    if [ ! -d "$cgroup/logins" ]; then open_cgroup; fi
    mkdir -p "$cgroup/$1"
    echo "$2" > "$cgroup/$1/cgroup.procs"
}

# Ends a cgroup's processes and waits for their end.
kill_all() {
    if [ ! -d "$1" ]; then return; fi
    echo 1 > "$1/cgroup.kill"
    tries=200
    while read -r _ populated < "$1/cgroup.events" && [ "$populated" = 1 ]; do
        tries=$((tries - 1))
        if [ "$tries" = 0 ]; then
            echo "processes of the agent do not end" >&2
            exit 1
        fi
        sleep 0.1
    done
}

case $1 in
    login)
        # Otherwise sshd would continue with a login that could not be moved.
        if [ "${PAM_TYPE:-}" = open_session ]; then join logins "$PPID" || kill -KILL "$PPID"; fi
        ;;
    join)
        open_cgroup
        join "$2" "$3"
        ;;
    kill) kill_all "$cgroup/$2" ;;
    reopen) open_cgroup ;;
esac
