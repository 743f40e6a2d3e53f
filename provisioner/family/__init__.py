"""The task family as it is given to us: read, checked and hashed, never imported or run.

Everything here is untrusted input until it has passed these checks.
"""
