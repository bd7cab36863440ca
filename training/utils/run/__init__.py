"""One run: its folder, metrics, trackers, progress, signs of divergence; its program and its launch. Knows no model."""
