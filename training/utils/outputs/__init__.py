"""What a run leaves at its end: models, written wherever there is room, which is reckoned at the start."""
