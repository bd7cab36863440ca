"""Losses on ranked and on marked responses: what each computes, and the table of their names."""
