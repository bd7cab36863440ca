"""Admission of the groups of `--rollouts_ahead free`, and the choice of those that a step takes.

A group is a prompt with its samples. At most oldest + 1 batches of groups are begun and not yet trained on when a step
begins. A step takes the groups that ended first, but as many of the older ones as it must so that later steps can train
on the rest before their weights are more than `oldest` steps old: it waits for these. Nothing is thrown away.
Knows neither prompts nor time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """oldest: steps that the weights of a group may be old. groups: of a batch. steps: of the run."""

    oldest: int
    groups: int
    steps: int

    def admitted(self, step: int) -> int:
        """Return how many groups of the run may have been begun when `step` begins."""
        return min(step + self.oldest, self.steps) * self.groups

    def taken(self, step: int, ended: Sequence[int], open_versions: Sequence[int]) -> list[int] | None:
        """Return the places in `ended` that `step` takes, ascending; None while too few have ended.

        ended: the versions that drew the groups that have ended, in the order in which they did. open_versions: of
        groups that are being drawn.

        Worked example, two groups a batch, oldest 1, step 2: of version 0 one group has ended and one has not, of
        version 1 two have ended. Both of version 0 would be too old in step 3, so that the step waits (None).
        """
        pending = Counter([*ended, *open_versions])
        chosen: list[int] = []
        pending_so_far = 0
        for version in sorted(pending):
            pending_so_far += pending[version]
            # The weights of `version` may train in the steps up to version + 1 + oldest.
            later_batches = max(version + 1 + self.oldest - step, 0)
            if not self._took(chosen, ended, version, pending_so_far - later_batches * self.groups):
                return None
        newest = max(pending, default=0)
        return sorted(chosen) if self._took(chosen, ended, newest, self.groups) else None

    def _took(self, chosen: list[int], ended: Sequence[int], version: int, wanted: int) -> bool:
        """Add to `chosen` until it has so many groups of weights up to `version`; False if too few have ended."""
        missing, before = wanted - sum(ended[place] <= version for place in chosen), set(chosen)
        more = [place for place, own in enumerate(ended) if own <= version and place not in before]
        chosen += more[: max(missing, 0)]
        return len(more) >= missing
