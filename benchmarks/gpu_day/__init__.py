"""What a GPU must show and no CPU can, in parts that each write a table: `python -m benchmarks.gpu_day`."""
