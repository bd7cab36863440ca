"""The best settings for a model on so many devices: python -m training.plan."""
