"""A sentence of pages and of the log. Every program imports it."""

OF_ANOTHER_RUN = (
    "its responses are those of the run that filled {} (--rollout_replay): scores, rewards and lengths of its rollouts "
    "say nothing of its own weights, and it has no evaluations"
)
