"""Watches a run's figures for signs of divergence: logs each once, and notes it for pages about the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from training.utils.base.console import log
from training.utils.divergence.signs import History, Uniform, signs
from training.utils.run.run_folder import DIVERGENCE, METRICS
from training.utils.run.run_log import RunLog


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
