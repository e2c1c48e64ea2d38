"""The command line: main.py dispatches, arguments.py has the flags, one file for each command."""
