"""Calls reward functions: what they receive, what they must return, and threads that run them."""
