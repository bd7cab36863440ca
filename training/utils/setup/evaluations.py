"""Opens what plugins have see a run's evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.contracts.evaluations import EvaluationObservers
from training.utils.data.chat.arguments import CHAT_TEMPLATE
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.engine.whole_model import WholeModel
    from training.utils.run.run_folder import RunFolder
    from training.utils.setup.opened_run import OpenedRun


class EvaluatedRun(NamedTuple):
    """A run that is about to be evaluated.

    settings: by the flags' names. model: in training; under ZeRO-3 each rank gathers a copy of it
    template: variables of the chat template, where the run's rows pass through it; None where they do not
    rows_per_batch: of an evaluation
    """

    settings: Mapping[str, Any]
    folder: RunFolder
    model: WholeModel
    tokenizer: PreTrainedTokenizerBase
    template: dict[str, Any] | None
    rows_per_batch: int


def open_evaluation_observer(
    run: OpenedRun, model: WholeModel, tokenizer: PreTrainedTokenizerBase, *, batch: int
) -> EvaluationObservers:
    """Return the observers of a run's evaluations. batch: rows of an evaluation that are read at once."""
    templated = run.plan.settings["prompt_style"] == CHAT_TEMPLATE
    template = run.flags.data.chat.template_kwargs if templated else None
    evaluated = EvaluatedRun(run.plan.settings, run.folder, model, tokenizer, template, batch)
    opened = [open_observer(evaluated) for open_observer in hooks("evaluation_observer")]
    return EvaluationObservers([observer for observer in opened if observer is not None])
