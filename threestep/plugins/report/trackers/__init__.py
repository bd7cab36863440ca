"""Trackers of services, one per file. Each imports its package when made."""
