"""Measures Threestep against its floor and its peers: `python -m benchmarks NAME`. Ratios of medians from one run."""
