"""An environment's life: up, agent, score, destroy, and what an operator does with it in between.

The one place that knows the order of its phases and unwinds what a failure cuts short.
"""
