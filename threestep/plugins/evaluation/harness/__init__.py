"""lm-evaluation-harness on finished models: its tasks, run by its package, with figures in the run's report."""
