"""One virtual machine on this host: QEMU, its disk, its users and logs, and the port on which it asks for its keys."""
