"""The clock of `--dry_run` beside tables that others published."""
