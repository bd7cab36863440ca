"""The records and digests of optimizer steps, for each kind of training."""
