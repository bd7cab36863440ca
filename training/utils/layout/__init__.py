"""Which token sees which, and what shares a row, micro-batch and rank. Knows no model or loss: only torch and NumPy."""
