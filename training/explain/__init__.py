"""The explanation of one optimizer step, token by token, from its record: `python -m training.explain`."""
