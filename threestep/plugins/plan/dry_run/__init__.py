"""`--dry_run`: the plan of a run and an estimate of its memory, from configurations alone."""
