"""Datasets made by code: the embedded task and the shapes."""
