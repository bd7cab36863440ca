"""Records and protocols between rooms: rows, documents, rollouts, the protocol of rollout engines. torch alone."""
