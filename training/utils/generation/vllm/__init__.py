"""The rollout engine of vLLM: its process, flags, weights, drafts, turns and images."""
