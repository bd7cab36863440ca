"""Visibility of tokens, and the planning of rows, micro-batches and ranks. Knows no model or loss: torch and NumPy."""
