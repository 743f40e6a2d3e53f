"""EC2 instances: which types there are and which one fits, where they start, and each one from its boot to its end."""
