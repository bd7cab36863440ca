"""Threestep: supervised fine-tuning, a pairwise reward model and PPO on DeepSpeed.

Importing this package imports nothing heavy; each step and room is imported where it is used.
"""

__version__ = "0.1.0"
