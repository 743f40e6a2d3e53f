"""An environment's machines: created, booted, destroyed until the cloud says that they are gone.

Knows no tasks. Environments of tasks and builders of images both stand on it.
"""
