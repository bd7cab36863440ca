"""Loading, saving, the scalar head, log-probabilities and LoRA."""
