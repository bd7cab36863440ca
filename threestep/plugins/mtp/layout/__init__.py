"""Multi-token prediction in rows: entries of each depth, and loss masks. Pure tensors."""
