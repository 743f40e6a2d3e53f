"""Reaches machines by SSH: connections, the calls of the exec server over them, and keys.

Data from a machine is untrusted: its size is bounded here, and the caller judges its contents.
"""
