"""The schedule of a run of `--rollouts_ahead free`, read back from its rollouts.jsonl (`--replay_schedule`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.run.run_folder import read_rollouts

if TYPE_CHECKING:
    from threestep.plugins.ahead.admission import Admission


@dataclass(frozen=True)
class GroupSchedule:
    """batches: positions of the prompts that each step trains on, from step 1 on. versions, rows: by position, the
    weights that draw it and the row that stands there."""

    batches: Sequence[Sequence[int]]
    versions: Mapping[int, int]
    rows: Mapping[int, int]

    def begun_by(self, version: int, rank: int, ranks: int) -> list[int]:
        """Return the positions that these weights draw on a rank, ascending: of those on which it trains."""
        own = (position for batch in self.batches for position in batch[rank::ranks])
        return sorted(position for position in own if self.versions[position] == version)

    def untrained(self, step: int, admitted: int) -> list[int]:
        """Return the positions below `admitted` that are not trained on by the end of `step`."""
        trained = {position for batch in self.batches[:step] for position in batch}
        return [position for position in range(admitted) if position not in trained]


def read_schedule(path: str | Path, admission: Admission) -> GroupSchedule:
    """Return the schedule in a rollouts.jsonl, up to the last step of the run. ThreestepError if it is none of such a
    run. admission: of all ranks."""
    flag, path = "--replay_schedule", Path(path)
    remedy = "pass the rollouts.jsonl of a run with --rollouts_ahead free and these settings"
    lines = [line for line in read_rollouts(path) if "rows" in line]
    if not lines or not all({"positions", "versions"} <= line.keys() for line in lines):
        raise ThreestepError(f"{flag}: {path} is not the schedule of a run with --rollouts_ahead free; {remedy}")
    steps = [line["step"] for line in lines]
    if steps[: admission.steps] != list(range(1, admission.steps + 1)):
        raise ThreestepError(
            f"{flag} needs steps 1 to {admission.steps:,} of this run, but {path} has {len(steps):,} steps, up to "
            f"step {max(steps):,}; lower --max_train_steps, or {remedy}"
        )
    batches, versions, rows = list[list[int]](), dict[int, int](), dict[int, int]()
    for line in lines[: admission.steps]:
        positions, drew = line["positions"], line["versions"]
        if len(positions) != admission.groups or set(positions) & versions.keys():
            raise ThreestepError(
                f"{flag} needs {admission.groups:,} new prompts in each step, but step {line['step']:,} of {path} "
                f"has {len(positions):,}, or repeats earlier ones; {remedy}"
            )
        ages = [line["step"] - 1 - version for version in drew]
        if not 0 <= min(ages) <= max(ages) <= admission.oldest:
            raise ThreestepError(
                f"{flag}: --max_rollout_age is {admission.oldest}, but the weights in step {line['step']:,} of "
                f"{path} are {min(ages)} to {max(ages)} steps old; use the --max_rollout_age of the run that wrote it"
            )
        batches.append(positions)
        versions |= zip(positions, drew, strict=True)
        rows |= zip(positions, line["rows"], strict=True)
    return GroupSchedule(batches, versions, rows)
