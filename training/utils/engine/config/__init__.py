"""DeepSpeed's configuration, from flags."""
