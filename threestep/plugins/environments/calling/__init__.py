"""Calls of a model: read, run within limits, and answered as text. Knows nothing of tokens or templates."""
