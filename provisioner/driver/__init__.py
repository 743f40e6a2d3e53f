"""Drives a task as the Task Standard says: the operations of the family's code in a machine, and what they print.

Data from a machine is untrusted: its size is bounded here, and the caller judges its contents.
"""
