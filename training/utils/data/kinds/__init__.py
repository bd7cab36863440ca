"""The kinds of rows: how a sample becomes such a row, and how the row is laid out."""
