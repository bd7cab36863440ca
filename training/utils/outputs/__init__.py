"""Models that a run leaves at its end, written wherever there is room, which is reckoned at the start."""
