"""The decode loop of a transformers model: caches, rows, masks, sampling, stop strings and bad words."""
