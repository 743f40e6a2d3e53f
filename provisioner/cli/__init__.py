"""The command line: parses, calls the library, prints. The only package that prints or exits."""
