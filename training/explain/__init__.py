"""What one optimizer step did, token by token, from its record: `python -m training.explain`."""
