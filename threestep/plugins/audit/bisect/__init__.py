"""Two runs, bisected: the first step that differs, and in it the first number that does, in the order of the data."""
