"""Works inside machines: SSH, the driver of the family's operations, file transfer, isolation probes, keys.

Data from a machine is untrusted: its size is bounded here, and the caller judges its contents.
"""
