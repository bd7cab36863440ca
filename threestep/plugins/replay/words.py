"""A sentence of pages and of the log. Every program imports it."""

OF_ANOTHER_RUN = (
    "its responses come from the run that filled {} (--rollout_replay): scores, rewards and lengths of the "
    "rollouts say nothing about this run's weights, and it has no evaluations"
)
