"""Trackers, one per file, and the table of their names. Each imports its package when it is opened."""
