"""Trackers, one per file, and the table of their names. Each serves --report_to; its package is imported when opened."""
