"""Errors, console output, files on disk and seeds: what every room may use. Knows no flag, model or engine."""
