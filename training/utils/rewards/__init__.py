"""Rewards that score text: one file per rule, and the code that calls them."""
