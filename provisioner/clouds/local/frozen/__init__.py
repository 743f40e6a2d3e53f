"""Frozen machines from which others resume: templates of images, and snapshots of running environments."""
