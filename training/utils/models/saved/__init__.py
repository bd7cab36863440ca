"""Weights of another precision, and a model folder: its description and its saving."""
