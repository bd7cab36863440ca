"""Part 7 of the loop: minibatches and optimizer steps."""
