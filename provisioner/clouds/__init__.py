"""Where machines run: one interface (cloud.py), a folder for each cloud, and the registry that chooses one.

Terraform starts modules of this package often, so nothing may be imported here.
"""
