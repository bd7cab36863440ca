"""The record of one optimizer step: its schema, its files, and the recorder that loops are given (`--record_steps`)."""
