"""Raw datasets and their registry, splits, cache, phases and collation of prompts."""
