"""Liger Kernel's fused operations in a model's forward."""
