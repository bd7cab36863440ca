"""Checkpoints: what is written, when, and how a run resumes from it."""
