"""Opens what plugins have see a run's evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.contracts.run import EvaluationObservers
from training.utils.data.rows.arguments import CHAT_TEMPLATE
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.contracts.media import RunMedia
    from training.utils.data.build.build import PhaseData
    from training.utils.engine.whole_model import WholeModel
    from training.utils.run.run_folder import RunFolder
    from training.utils.setup.opened_run import OpenedRun


class HeldOutRows(NamedTuple):
    """The rows that steps 1 and 2 evaluate. ends: tokens that end a response. media: of the rows; None without any."""

    phase: PhaseData
    ends: Sequence[int]
    media: RunMedia | None


class EvaluatedRun(NamedTuple):
    """A run that is about to be evaluated.

    settings: by the flags' names. model: in training; under ZeRO-3 each rank gathers a copy of it
    template: variables of the chat template, where the run's rows pass through it; None where they do not
    rows_per_batch: of an evaluation
    held_out: None in step 3
    """

    settings: Mapping[str, Any]
    folder: RunFolder
    model: WholeModel
    tokenizer: PreTrainedTokenizerBase
    template: dict[str, Any] | None
    rows_per_batch: int
    held_out: HeldOutRows | None = None


def open_evaluation_observer(
    run: OpenedRun,
    model: WholeModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch: int,
    held_out: HeldOutRows | None = None,
) -> EvaluationObservers:
    """Return the observers of a run's evaluations. batch: rows of an evaluation that are read at once. held_out: see
    `EvaluatedRun`."""
    templated = run.plan.settings["prompt_style"] == CHAT_TEMPLATE
    template = run.flags.data.chat.template_kwargs if templated else None
    evaluated = EvaluatedRun(run.plan.settings, run.folder, model, tokenizer, template, batch, held_out)
    opened = [open_observer(evaluated) for open_observer in hooks("evaluation_observer")]
    return EvaluationObservers([observer for observer in opened if observer is not None])
