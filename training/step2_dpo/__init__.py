"""Step 2 without a reward model: the policy itself is trained on ranked responses (direct preference optimisation)."""
