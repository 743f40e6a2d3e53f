#!/bin/bash
# Makes a wrong guess, and ends with an error.
echo 1 > ~/guess.txt
echo "giving up" >&2
exit 3
