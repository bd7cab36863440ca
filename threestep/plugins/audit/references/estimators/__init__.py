"""Advantages from rewards, in float64: of groups and of GAE, and the estimators beside them, a file each.

B responses, R their tokens one after the other.
"""
