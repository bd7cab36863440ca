"""Trackers of services, one per file. Each imports its package when made."""

PROJECT = "threestep"  # in services that part runs by project
