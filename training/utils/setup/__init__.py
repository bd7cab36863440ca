"""Opens a run: folder, model, data and settings of the loop."""
