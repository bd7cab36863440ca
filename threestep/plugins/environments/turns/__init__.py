"""Conversations as tokens: turns that a model draws, and what is said in between, under a chat template."""
