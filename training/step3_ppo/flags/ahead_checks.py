"""Refusals of --rollouts_ahead: anything that decides about a rollout by what later weights make of it, or
that draws by the model in training while the thread draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout_engine import RolloutEngine


def check_ahead(flags: PpoFlags, algorithm: Algorithm, mistakes: Mistakes) -> None:
    """Note every flag that does not go with --rollouts_ahead."""
    ppo = flags.ppo
    if not ppo.steps_ahead:
        return
    tries, advantage = algorithm.flags.dynamic_sampling_tries, algorithm.flags.advantage
    for name, given, why in (
        (f"dynamic_sampling_tries {tries}", tries, "draws other prompts once a step sees the scores of its own"),
        ("prompt_sampler", ppo.prompt_sampler, "chooses prompts by the scores of the step before"),
        ("prompt_dataset", ppo.prompt_dataset, "changes prompts by the scores of the step before"),
        (f"advantage {advantage}", algorithm.estimator.needs_greedy, "draws greedy responses by the newest weights"),
        (
            f"advantage {advantage}",
            algorithm.estimator.needs_policy,
            "reads the distributions of the policy that drew, whose weights are gone by then",
        ),
        (
            "report_variance",
            ppo.report_variance,
            "reads the distributions of the policy that drew, whose weights are gone by then",
        ),
        (f"speculate {ppo.speculate}", ppo.speculate != "0", "guesses by what is trained meanwhile"),
        ("val_only", ppo.val_only, "trains nothing to be ahead of"),
    ):
        mistakes.require(
            not given,
            f"--rollouts_ahead {ppo.rollouts_ahead} draws responses before the step that takes them, and --{name} "
            f"{why}; leave one of them out",
        )


def check_ahead_of_run(
    flags: PpoFlags, engine: type[RolloutEngine], media: RunMedia | None, *, rollouts: int, ranks: int
) -> None:
    """ThreestepError for a run whose rollouts cannot be drawn ahead. rollouts: of the run. media: of its prompts."""
    ahead, is_free = flags.ppo.rollouts_ahead, flags.ppo.takes_as_they_end
    if not flags.ppo.steps_ahead:
        return
    if rollouts <= flags.ppo.steps_ahead and not is_free:
        raise ThreestepError(
            f"--rollouts_ahead {ahead} expects a run of more rollouts than that, got {rollouts}: all of them would be "
            "drawn by the first weights; give less, or more data or epochs"
        )
    if media is not None:
        raise ThreestepError(
            f"--rollouts_ahead {ahead} does not go with prompts that have images: their features are read by the model "
            "in training; leave it out"
        )
    if engine.takes_weights and ranks > 1 and not engine.meets_other_ranks:
        raise ThreestepError(
            f"--rollouts_ahead {ahead} sends kept weights to --rollout_engine {flags.ppo.rollout_engine} from the "
            f"first rank while the others train, got {ranks} ranks, which do not wait for them; use one rank, or leave "
            "it out"
        )
