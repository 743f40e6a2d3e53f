"""Family and aux images: built once, in a builder with internet, and named by all that went into them.

The family's code runs in the builder, never on the controller.
"""
