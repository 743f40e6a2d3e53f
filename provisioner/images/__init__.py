"""Builds family and aux images once, in a builder with internet, and names them by a hash of their contents.

The family's code runs in the builder, never on the controller.
"""
