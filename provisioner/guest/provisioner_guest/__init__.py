"""What runs inside machines, with the standard library alone: from Python 3.8 on, which Ubuntu 20.04 has."""
