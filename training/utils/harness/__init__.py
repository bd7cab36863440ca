"""lm-evaluation-harness: one call of its package, for finished models and for the evaluations of a run."""
