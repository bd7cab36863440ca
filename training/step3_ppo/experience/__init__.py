"""Parts 3 to 6 of the loop: from rollouts to experiences."""
