"""Whether a run still learns, told from the figures that it writes anyway."""
