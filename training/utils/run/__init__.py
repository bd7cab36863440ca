"""Arguments, errors, metrics, progress and seeds of one run. Knows no model and no engine."""
