"""Weights and outputs of a model as numbers: sizes under ZeRO-3, buffers, rounding, probes."""
