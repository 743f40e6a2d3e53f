"""The commands, each in a module of its name, which is imported when the command is used."""
