"""Loading from a model's folder or hub name: its configuration, its tokenizer, its weights."""
