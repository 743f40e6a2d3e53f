"""A region's network, the rules that limit its machines, and what EC2's API shows of an environment's isolation."""
