"""Seconds and money of runs that do not exist yet: counted work on a table of devices. plan/README.md."""
