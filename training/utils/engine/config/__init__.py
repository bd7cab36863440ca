"""DeepSpeed's configuration: from flags, or from the user's JSON with the missing keys filled in."""
