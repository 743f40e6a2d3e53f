"""Proves that an environment is isolated before anything of the task starts in it.

The machines are asked to probe; the controller names every probe, and judges the answers with what the cloud sees.
"""
