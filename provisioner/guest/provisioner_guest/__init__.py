"""What runs inside machines, with the standard library alone.

Aux VMs run the exec server and build steps under their own Python, which is 3.8 on Ubuntu 20.04.
"""
