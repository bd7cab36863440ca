"""Ranked responses: their batches and scores, and a reference model's log-probabilities of them."""
