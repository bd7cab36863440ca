"""The rows of the three phases: tokens, documents for the layout, batches, views."""
