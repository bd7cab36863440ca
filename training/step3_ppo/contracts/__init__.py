"""Records that the parts of step 3 hand to each other, and their settings."""
