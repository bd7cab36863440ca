"""A reward model, ours or another's, judged on preference data, or asked to score pairs."""
