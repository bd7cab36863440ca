"""Rewards by rule, one per file."""
