"""Calls of reward functions: their arguments, checks of their results, and threads that run them."""
