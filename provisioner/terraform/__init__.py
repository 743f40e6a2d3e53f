"""Renders Terraform roots and runs Terraform on them.

Knows no task.
"""
