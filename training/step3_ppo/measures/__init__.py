"""Statistics over all ranks. Pure tensors."""
