#!/bin/sh
# Runs Terraform in a session of its own, so that a Ctrl-C at the terminal reaches the controller alone, and with the
# stack's lock: Terraform and what it starts keep the lock file open, so the lock is free only when all of them ended.
# The working directory is the stack's. Both programs replace this one, so the process id stays.
echo "$$" > terraform.pid
exec setsid flock --no-fork --exclusive --timeout "${PROVISIONER_LOCK_SECONDS:-0}" terraform.lock terraform "$@"
