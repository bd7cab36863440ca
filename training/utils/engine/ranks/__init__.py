"""The ranks of a run: start and end, devices, collectives, and leaving a run that fails."""
