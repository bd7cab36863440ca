"""Files as sequences of rows: where they lie, what their content hashes to, and what is in them."""
