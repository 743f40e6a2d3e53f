"""Creates, boots and destroys an environment's machines, until the cloud confirms that they are gone.

Knows no tasks. Both the environments of tasks and the builders of images use it.
"""
