"""Signs that a run has diverged, or does not train, from the figures that it writes anyway. Knows no step and no model.

A run with these signs ends normally, with a model: the signs' sentences stand in its log, its last line and its report.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.utils.base.console import log
from training.utils.run.run_folder import DIVERGENCE, METRICS, RunLog

# A single step's loss and norm vary by a factor of a few from batch to batch, so signs are read of this many.
WINDOW = 10
# A loss this close to the uniform one, or above it, is no better than it. Equal logits give log V but for rounding:
# bfloat16's 8 bits are a relative 0.4 %, of logits that differ by less than 0.01.
UNIFORM_SHARE = 0.999
# "Rises" means: it was below this share of the uniform loss. A model that has learned no more than its tokens'
# frequencies is below it (English letters: 4.2 of 4.8 bits, Shannon 1951, Prediction and Entropy of Printed English).
LEARNED_SHARE = 0.95
# Gradients in a row that are zero, or not finite. One may be a batch whose terms are all clipped (PPO, DPO's hinge), or
# fp16 that looks for its loss scale.
ZERO_STEPS = 3
# Norms fall by a factor of 10 in training and spike by one of 10 (Cohere, PaLM, OLMo report such spikes); medians of
# WINDOW steps that are this far above the run's first are no spike.
GROWN = 100.0
_NORM = "grad_norm"


@dataclass(frozen=True)
class Uniform:
    """The loss of a model to which all choices are equally likely, in nats.

    choices: e.g. "all 50,257 tokens"
    figure: the one that rises to it
    begins_there: a run's first step has it, as DPO's has, whose policy is the reference
    """

    nats: float
    choices: str
    figure: str = "the loss"
    begins_there: bool = False


EQUAL_PAIRS = Uniform(math.log(2.0), "both responses of a pair", begins_there=True)


@dataclass
class History:
    """The recent figures of a run that signs need: a few of its steps, in order."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lowest: float = float("inf")  # mean of WINDOW losses, or an evaluation's loss
    evaluated: float | None = None  # the last evaluation's loss, of a model that has trained
    norms: dict[str, deque[float]] = field(default_factory=dict)
    first_norms: dict[str, list[float]] = field(default_factory=dict)
    zeros: dict[str, int] = field(default_factory=dict)  # in a row, up to now
    infinite: dict[str, int] = field(default_factory=dict)  # the same, of norms that are not finite: skipped steps

    def add(self, step: int, figures: Mapping[str, float], loss: str, eval_loss: str) -> None:
        """Take the figures of one line. loss, eval_loss: their names; "" for none."""
        if step and eval_loss in figures:
            self.evaluated = figures[eval_loss]
            self.lowest = min(self.lowest, self.evaluated)
        if math.isfinite(figures.get(loss, math.nan)):  # of a step that is not, no weight has changed
            self.losses.append(figures[loss])
            if len(self.losses) == WINDOW:
                self.lowest = min(self.lowest, statistics.fmean(self.losses))
        for name, norm in figures.items():
            if not name.endswith(_NORM):
                continue
            self.infinite[name] = 0 if math.isfinite(norm) else self.infinite.get(name, 0) + 1
            if math.isfinite(norm):
                self.norms.setdefault(name, deque(maxlen=WINDOW)).append(norm)
                first = self.first_norms.setdefault(name, [])
                if len(first) < WINDOW:
                    first.append(norm)
                self.zeros[name] = self.zeros.get(name, 0) + 1 if norm == 0 else 0


def signs(history: History, uniform: Uniform | None, at_end: bool = False) -> dict[str, str]:
    """Return a sentence for each sign that a run shows now, by the kind of sign.

    uniform: None where no loss is known to be one of equal choices
    at_end: nothing follows: a loss that never fell below the uniform one, and a last gradient of 0, are signs too
    """
    sentences = _of_loss(history, uniform, at_end)
    for name, zeros in history.zeros.items():
        if zeros >= ZERO_STEPS or (at_end and zeros):
            sentences[f"{name} zero"] = (
                f"{name} has been exactly 0 for the last {zeros} steps: nothing trains; check the learning rate of "
                "earlier steps, which weights are frozen, and whether the rewards or pairs differ"
            )
    for name, skipped in history.infinite.items():
        if at_end and skipped >= ZERO_STEPS:  # earlier, each step is logged, and too many end the run (`bad_steps`)
            sentences[f"{name} infinite"] = (
                f"{name} has not been finite for the last {skipped} steps, which were skipped: the run has diverged; "
                "lower the learning rate, or warm it up for longer"
            )
    for name, norms in history.norms.items():
        first, last = statistics.median(history.first_norms[name]), statistics.median(norms)
        if len(norms) == WINDOW and last > GROWN * first > 0:
            sentences[f"{name} grown"] = (
                f"{name} has a median of {last:.3g} over {WINDOW} steps, up from {first:.3g} at the beginning: it "
                "keeps growing; lower the learning rate, or warm it up for longer"
            )
    return sentences


def _of_loss(history: History, uniform: Uniform | None, at_end: bool) -> dict[str, str]:
    if history.evaluated is not None and not math.isfinite(history.evaluated):
        return {
            "loss": f"the held-out loss is {history.evaluated}: the run has diverged; lower the learning rate, or warm "
            "it up for longer"
        }
    if uniform is None:
        return {}
    losses, most = history.losses, uniform.nats * UNIFORM_SHARE
    trained = statistics.fmean(losses) if losses and (at_end or len(losses) == WINDOW) else None
    known = history.evaluated if at_end or trained is None or trained < most else trained
    known = trained if known is None else known
    if known is None or not known >= most:
        return {}
    about = f"{known:.4g} nats (a model that finds {uniform.choices} equally likely has {uniform.nats:.4g})"
    learned = LEARNED_SHARE * uniform.nats
    if trained is not None and trained < learned:  # the model overfits, which is no divergence
        return {}
    if history.lowest < learned:
        return {
            "loss": f"{uniform.figure} has risen to {about} from {history.lowest:.4g}: the run has diverged; lower "
            "the learning rate, or warm it up for longer"
        }
    if not at_end or (uniform.begins_there and known < uniform.nats / LEARNED_SHARE):
        return {}
    return {
        "loss": f"{uniform.figure} is {about}: the model has diverged, or learned nothing; lower the learning rate, or "
        "train for longer"
    }


class DivergenceWatch:
    """The signs of one run. On the main rank, it writes `divergence.jsonl`, whose lines pages about the run show.

    loss, eval_loss: the names of the figures that `uniform` is the upper bound of; "" for none
    folder: of the run; None writes nothing. Figures of a resumed run that metrics.jsonl holds were seen before.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        is_main: bool = True,
        uniform: Uniform | None = None,
        loss: str = "",
        *,
        eval_loss: str = "",
    ) -> None:
        self._notes = None if folder is None or not is_main else RunLog(Path(folder) / DIVERGENCE)
        self._is_main, self._uniform, self._names = is_main, uniform, (loss, eval_loss)
        self._history, self._step = History(), 0
        self._logged: set[str] = set()
        before = None if self._notes is None else self._notes.path.with_name(METRICS)
        if before is not None and before.is_file():
            for line in before.read_text(encoding="utf-8").splitlines():
                # null: a number that is not finite
                figures = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
                self._add(int(figures["step"]), figures)
                self._logged |= signs(self._history, self._uniform).keys()

    def see(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step, or of an evaluation after it; log signs that are new."""
        self._add(step, figures)
        for sentence in self._note(signs(self._history, self._uniform)):
            log(f"warning: step {step:,}: {sentence}", self._is_main)

    def closing(self) -> str:
        """End of the run's last line that names its signs; "" if it has none."""
        sentences = signs(self._history, self._uniform, at_end=True)
        self._note(sentences)
        if self._notes is not None:
            self._notes.settle()
        return "".join(f"; warning: {sentence}" for sentence in sentences.values())

    def _add(self, step: int, figures: Mapping[str, float]) -> None:
        self._step = step
        self._history.add(step, figures, *self._names)

    def _note(self, sentences: Mapping[str, str]) -> list[str]:
        """Write the sentences that are new, and return them."""
        new = [sentence for kind, sentence in sentences.items() if kind not in self._logged]
        self._logged |= sentences.keys()
        if self._notes is not None:
            self._notes.append(json.dumps({"step": self._step, "sentence": sentence}) for sentence in new)
        return new
