"""The local cloud: QEMU machines on the controller itself. No account, no root, no daemon.

cloud.py holds LocalCloud; every other module has one concern of a machine, its image or its network.
Terraform starts machine.py often, so nothing may be imported here.
"""
