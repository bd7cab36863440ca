"""Step 2: a reward model from pairs of chosen and rejected responses."""
