"""Base weights in 4 and 8 bits under LoRA."""
