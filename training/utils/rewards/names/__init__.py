"""Entries of --reward: names, weights, and which of them are addresses of services."""
