"""The one effect that creates and removes what costs money: rendered roots, and Terraform run on them.

Knows no cloud and no task.
"""
