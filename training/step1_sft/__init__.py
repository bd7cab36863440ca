"""Step 1: supervised fine-tuning on chosen responses."""
