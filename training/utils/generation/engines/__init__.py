"""Rollout engines in this process, one per file: transformers and DeepSpeed's."""
