"""Rewards that ask a service over HTTP: a judge, or a reward model elsewhere. Retries, budgets, the log of verdicts."""
