"""A sweep over every family of models of transformers, of language and of images: `python -m tests.families`."""
