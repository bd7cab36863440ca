"""A sweep over every family of causal language models that transformers has: `python -m tests.families`."""
