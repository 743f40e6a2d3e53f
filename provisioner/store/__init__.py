"""Keeps files on disk: the home directory, the records of environments and images, locks and leases.

Knows what the files contain and writes them safely. Creates nothing in any cloud.
"""
