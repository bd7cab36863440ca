"""The images of a run: their reader, the examples for the start-up check, and the pictures of samples."""
