"""Trackers, one per file, and the table of their names. Each serves --report_to, and imports its package when made."""
