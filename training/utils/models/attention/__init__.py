"""Attention of token rows: its forms, their arguments for each implementation, and its precision."""
