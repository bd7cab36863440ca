"""The model of a record, and its derivatives along directions of its weights."""
