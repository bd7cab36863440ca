"""The images of a run's rows on their way to a model."""
