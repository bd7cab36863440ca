"""A server for training loops in the form of the Tinker API: `python -m training.serve_training`."""
