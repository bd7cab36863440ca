"""The kinds of rows, one module each: how a sample becomes such a row, and how the row is laid out."""
