"""Signs that a run has stopped learning, from the figures that it writes anyway."""
