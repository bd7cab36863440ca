"""Signs that a reward is gamed: scored samples before and after training in, figures and sentences out."""
