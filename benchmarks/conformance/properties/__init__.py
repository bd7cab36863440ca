"""Properties, by kind of training; each runs in a trainer's environment."""
