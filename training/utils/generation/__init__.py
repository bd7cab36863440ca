"""Draws text from a model: rollout engines, sampling, caches, bad words and stop strings."""
