"""Into machines: SSH, the driver of the family's operations, file transfer, isolation probes, keys.

What comes back is a stranger's: it is bounded here, and judged by the caller.
"""
