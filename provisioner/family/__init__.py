"""Reads, checks and hashes a task family's files. Never imports or runs its code.

All input is untrusted until it has passed these checks.
"""
