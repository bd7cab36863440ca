"""Errors, console output, files, seeds, names that flags take: what every room may use. Knows no flag and no model."""
