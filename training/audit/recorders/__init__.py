"""Records of other trainers, watched from outside: nothing of their installation is changed."""

from training.audit.recorders.watch import recorded

__all__ = ["recorded"]
