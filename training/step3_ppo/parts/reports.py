"""Part 8 of the loop: the figures of a rollout and its updates, to metrics, the progress, and signs of divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from training.utils.base.console import log
from training.utils.run.divergence import DivergenceWatch, Uniform
from training.utils.run.progress import ShownFigure, show

if TYPE_CHECKING:
    from tqdm import tqdm

    from training.step3_ppo.contracts.settings import PpoSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.run.metrics import MetricsWriter

_MANY_CUT = 0.05  # share of a rollout's responses from which a warning names the length limit


class Reports:
    """Reports of a run's rollouts, on every rank."""

    def __init__(self, roles: Roles, settings: PpoSettings, metrics: MetricsWriter) -> None:
        self._roles, self._settings, self._metrics = roles, settings, metrics
        self._warned_of_cut = False
        self._divergence = DivergenceWatch()

    def begin(self) -> None:
        """Watch from here on for a policy to which all tokens become equally likely, and for gradients. A run that
        resumes has written figures before, which are read."""
        vocabulary = self._roles.actor_model.config.get_text_config().vocab_size
        uniform = Uniform(math.log(vocabulary), f"all {vocabulary:,} tokens", "the policy's entropy")
        is_main = self._roles.actor.ranks.is_main
        self._divergence = DivergenceWatch(self._metrics.folder, is_main, uniform, "rollout/entropy")

    def write(
        self,
        iteration: int,
        figures: dict[str, float],
        seconds: Mapping[str, float],
        drawing: Sequence[Mapping[str, float]],
        *,
        kl_coef: float,
    ) -> None:
        """Complete the figures and write them. seconds: of each part. drawing: figures of what draws."""
        tokens, drawn = figures.pop("rollout/tokens"), figures.pop("rollout/drawn_tokens")
        flops = figures.pop("learn/flops", None)
        if self._roles.reference is not None:
            figures["rollout/kl_coef"] = kl_coef
        figures |= {f"time/{name}": spent for name, spent in seconds.items()}
        step_seconds = sum(spent for name, spent in seconds.items() if name not in ("evaluation", "checkpoint"))
        figures["train/tokens_per_second"] = tokens / step_seconds
        figures["train/tokens_per_second_per_rank"] = tokens / step_seconds / self._roles.actor.ranks.world_size
        for name, spent in seconds.items():  # of numbered parts: the rollout's drawn tokens, or all
            if name[0].isdigit():
                figures[f"time_per_token_ms/{name}"] = 1000.0 * spent / (drawn if name == "2_rollout" else tokens)
        if flops is not None:
            figures["train/mfu"] = flops / seconds["7_learn"] / self._settings.updates.meters[0].peak_flops_per_second
        for found in drawing:
            figures |= found
        self._metrics.write(iteration, figures)

    def show(self, iteration: int, figures: Mapping[str, float], bar: tqdm) -> None:
        """Show some of the figures, and warn of those that ask for it."""
        self._divergence.see(iteration, figures)
        show(bar, *shown(figures))
        self.warn_of_cut(figures, iteration)

    def closing(self) -> str:
        """Return signs that the run has diverged, for its last line."""
        return self._divergence.closing()

    def warn_of_cut(self, figures: Mapping[str, float], iteration: int) -> None:
        """Say once that many responses reach a limit, where rewards and losses read unfinished text."""
        cut_share = 1.0 - figures["rollout/ended_share"]
        if self._warned_of_cut or cut_share < _MANY_CUT:
            return
        self._warned_of_cut = True
        limit = f"--max_answer_seq_len {self._settings.drawing.sampling.max_new_tokens:,} tokens"
        if "conversation/turns" in figures:
            limit = "a conversation limit (conversation/cut_by_... in metrics.jsonl shows which)"
        log(
            f"warning: {cut_share:.0%} of the responses in rollout {iteration:,} were cut off at {limit} before they "
            "ended; rollout/ended_share in metrics.jsonl tracks this (raise the limit, or see --missing_eos_penalty "
            "and --mask_truncated_responses)",
            self._roles.actor.ranks.is_main,
        )


def shown(figures: Mapping[str, float]) -> list[ShownFigure]:
    """Return the figures that the progress line shows of a rollout and its updates."""
    cut_share = 1.0 - figures["rollout/ended_share"]
    rate = figures.get("actor/learning_rate", figures.get("critic/learning_rate"))  # the critic's while it warms up
    found = [ShownFigure("score", figures["rollout/score"])]
    if "rollout/kl" in figures:
        found.append(ShownFigure("KL", figures["rollout/kl"]))
    if cut_share > 0:
        by = "by a limit" if "conversation/turns" in figures else "at the length limit"
        found.append(ShownFigure(f"cut {by}", cut_share, ".0%"))
    if rate is not None:
        found.append(ShownFigure("learning rate", rate, ".2e", is_mean=False))
    return [*found, ShownFigure("", figures["train/tokens_per_second"], ",.0f", "tok/s")]
