"""The commands, a module for each group of them. Each is imported when one of its commands is used."""
