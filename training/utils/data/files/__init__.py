"""Files as sequences of rows: their addresses, hashes and content."""
