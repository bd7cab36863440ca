"""Trainers, one per file; each runs in its trainer's environment."""
