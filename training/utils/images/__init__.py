"""Images among tokens: spans, pixels and kept features. Knows no model: torch alone."""
