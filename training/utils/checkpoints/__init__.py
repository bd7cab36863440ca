"""Checkpoints: their content, their times, and resuming from them."""
