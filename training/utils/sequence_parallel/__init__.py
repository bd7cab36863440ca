"""Sequence parallelism (Ulysses): the ranks of a group hold slices of the same rows, attention sees whole rows."""
