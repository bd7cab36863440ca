"""Records of other trainers, watched from outside: nothing of their installation is changed."""

from threestep.plugins.audit.recorders.watch import recorded

__all__ = ["recorded"]
