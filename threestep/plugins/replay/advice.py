"""Said on a page and in the log of a run that reads rollouts: cheap to import, for the plugin's list has it."""

from __future__ import annotations

OF_ANOTHER_RUN = (
    "its responses are those of the run that filled {} (--rollout_replay): scores, rewards and lengths of its rollouts "
    "say nothing of its own weights, and it has no evaluations"
)
