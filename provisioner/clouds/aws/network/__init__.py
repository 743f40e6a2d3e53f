"""A region's network, who may reach what in it, and what EC2's API shows of an environment's isolation."""
