"""What rooms hand to each other: rows, documents, rollouts, and the protocol of rollout engines. torch alone."""
