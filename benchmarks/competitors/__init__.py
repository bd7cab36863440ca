"""One program a competitor: each trains some steps on the workload and prints one JSON line a step."""
