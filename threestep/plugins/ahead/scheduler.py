"""The scheduler of `--rollouts_ahead`: what it goes with, and its queue: in strict order, or as groups end.

It does not go with anything that decides about a rollout by what later weights make of it, or that draws by the model
in training while the thread draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.ahead.arguments import AheadArguments
from training.step3_ppo.flags.rollout_choices import RolloutScheduler, source_of
from training.utils.base.errors import ThreestepError
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.ahead.admission import Admission
    from threestep.plugins.ahead.schedule import GroupSchedule
    from training.step3_ppo.contracts.rollouts import Asking, RolloutQueue
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.arguments import PpoArguments
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout_engine import RolloutEngine


def rollout_scheduler(flags: PpoFlags) -> AheadScheduler | None:
    """Return the scheduler of --rollouts_ahead; None where the newest weights draw."""
    own = flags.added.of(AheadArguments)
    speculate = flags.settings.get("speculate", "0")  # of a plugin, which may not be there
    choosers = [name for name in added("prompt_sources", ()) if flags.settings.get(name) is not None]
    return AheadScheduler(own, flags.ppo, speculate, source_of(flags).name, choosers) if own.steps_ahead else None


@dataclass(frozen=True)
class AheadScheduler(RolloutScheduler):
    """Draws the rollouts of later steps while one trains. source: the flag that names another than the engine.
    choosers: flags that are set, of a source of prompts that sees scores."""

    flags: AheadArguments
    ppo: PpoArguments
    speculate: str = "0"
    source: str = ""
    choosers: Sequence[str] = ()

    def wanted(self) -> dict[str, Any]:
        return {"rollouts_ahead": self.flags.rollouts_ahead}

    def check(self, algorithm: Algorithm, mistakes: Mistakes) -> None:
        ppo = self.ppo
        tries, advantage = algorithm.flags.dynamic_sampling_tries, algorithm.flags.advantage
        for name, given, why in (
            (
                f"dynamic_sampling_tries {tries}",
                tries,
                "draws more prompts after a step has seen the scores of its first ones",
            ),
            *((name, True, "chooses prompts by the scores of the previous step") for name in self.choosers),
            (
                f"advantage {advantage}",
                algorithm.estimator.needs_greedy,
                "generates greedy responses with the newest weights",
            ),
            (
                f"advantage {advantage}",
                algorithm.estimator.needs_policy,
                "needs the distributions of the policy that generated the responses, whose weights are gone by then",
            ),
            (
                "report_variance",
                ppo.report_variance,
                "needs the distributions of the policy that generated the responses, whose weights are gone by then",
            ),
            (
                f"speculate {self.speculate}",
                self.speculate != "0",
                "drafts tokens with weights that are trained in the meantime",
            ),
            ("val_only", ppo.val_only, "does not train, so there are no steps to run ahead of"),
        ):
            mistakes.require(
                not given,
                f"--rollouts_ahead {self.flags.rollouts_ahead} generates responses before the step that trains on "
                f"them, but --{name} {why}; remove one of them",
            )
        mistakes.require(
            not self.flags.takes_as_they_end or not self.source,
            f"--{self.source} numbers rollouts in the order they are generated, which depends on timing with "
            f"--rollouts_ahead free; remove --{self.source}, and repeat a run with --replay_schedule",
        )

    def check_run(
        self, engine: type[RolloutEngine], media: RunMedia | None, *, rollouts: int, prompts_of_step: int, ranks: int
    ) -> None:
        ahead = self.flags.rollouts_ahead
        if rollouts <= self.flags.steps_ahead and not self.flags.takes_as_they_end:
            raise ThreestepError(
                f"--rollouts_ahead {ahead} needs a run of more than {ahead} rollouts, but this run has {rollouts}, so "
                "the initial weights would generate them all; lower --rollouts_ahead, or use more data or epochs"
            )
        if media is not None:
            raise ThreestepError(
                f"--rollouts_ahead {ahead} does not work with prompts that have {media.name}, because the model in "
                "training computes their features; remove --rollouts_ahead"
            )
        if engine.takes_weights and ranks > 1 and not engine.meets_other_ranks:
            raise ThreestepError(
                f"--rollouts_ahead {ahead} with --rollout_engine {self.ppo.rollout_engine} works on one rank only, "
                f"because the first rank sends weights while the other ranks train, but this run has {ranks} ranks; "
                "use one rank, or remove --rollouts_ahead"
            )
        if self.flags.replay_schedule is not None:
            self._schedule(prompts_of_step, rollouts)

    def kept_versions(self, engine: type[RolloutEngine], beside_training: bool) -> int:
        from threestep.plugins.ahead.free import GROUPS_AT_ONCE

        if not beside_training:
            return 1
        if not self.flags.takes_as_they_end:
            return self.flags.steps_ahead
        at_once = 1 if engine.takes_weights else GROUPS_AT_ONCE
        return min(self.flags.steps_ahead, at_once) + 1

    def open(self, asking: Asking) -> RolloutQueue:
        settings, engine, lender, of_step, of_position = asking
        drawing, ranks, steps = settings.drawing, lender.engine.ranks, settings.total_rollouts
        in_background = engine.takes_weights or ranks.device.type == "cpu"
        if not self.flags.takes_as_they_end:
            from threestep.plugins.ahead.pipeline import RolloutsAhead

            ahead = self.flags.steps_ahead
            return RolloutsAhead(ahead, engine, lender, of_step, last_step=steps, in_background=in_background)
        from threestep.plugins.ahead.free import FreeRollouts

        batches = drawing.generation_batches
        groups = drawing.prompts_per_batch * batches
        schedule = None if self.flags.replay_schedule is None else self._schedule(groups * ranks.world_size, steps)
        return FreeRollouts(
            self._admission(groups, steps),
            batches,
            engine,
            lender,
            ask=of_position,
            schedule=schedule,
            in_background=in_background,
        )

    def _admission(self, groups: int, steps: int) -> Admission:
        from threestep.plugins.ahead.admission import Admission

        return Admission(self.flags.steps_ahead, groups, steps)

    def _schedule(self, groups: int, steps: int) -> GroupSchedule:
        """Return the schedule of --replay_schedule. groups: of a step, of all ranks."""
        from threestep.plugins.ahead.schedule import read_schedule

        assert self.flags.replay_schedule is not None
        return read_schedule(self.flags.replay_schedule, self._admission(groups, steps))
