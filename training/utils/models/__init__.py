"""Loading, saving, the scalar head, log-probabilities."""
