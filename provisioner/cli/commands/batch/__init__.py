"""The commands of the group `batch`, and what they show and write."""
