"""Parts 2 to 6 of the loop: from prompts to experiences."""
