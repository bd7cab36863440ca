"""Rollout engines in this process, one per file: transformers, DeepSpeed's, and parallel paths."""
