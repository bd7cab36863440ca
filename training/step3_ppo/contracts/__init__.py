"""Records that the parts of step 3 hand to each other, their settings, and measures over all ranks."""
