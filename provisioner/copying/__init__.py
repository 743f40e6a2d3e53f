"""Copies file trees between the controller and machines.

Neither the machine is trusted nor are other users of either side. Two of the modules also run in machines.
"""
