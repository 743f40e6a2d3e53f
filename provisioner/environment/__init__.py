"""Runs an environment's life: up, agent, score, destroy, and the operator's commands in between.

The only folder that knows the order of the phases and cleans up after a failure in one of them.
"""
