"""Published benchmarks of reward models: their files, and scores as their authors count them."""
