"""Distillation: a teacher whose next-token distributions the model in training is drawn to."""
