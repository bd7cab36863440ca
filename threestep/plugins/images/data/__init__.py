"""Images of rows: their bytes, what is decoded, and where they stand among a conversation's texts."""
