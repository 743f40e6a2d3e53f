"""The exec server's calls: programs and files, for the controller."""
