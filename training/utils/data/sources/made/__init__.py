"""A dataset made by code: the embedded task."""
