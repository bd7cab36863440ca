"""The samples of an evaluation in steps 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.samples.ranked import MOST_ROWS, ranked_samples
from threestep.plugins.samples.samples import SampleTexts, sampled_rows
from threestep.plugins.samples.sentences import GreedyDrawing, open_drawing, sentence_samples
from training.utils.contracts.rows import SentenceRow
from training.utils.contracts.run import EvaluationObserver
from training.utils.setup.media import media_keeper

if TYPE_CHECKING:
    from training.utils.contracts.run import EvaluatedRun
    from training.utils.engine.ranks.startup import Ranks


def open_samples(run: EvaluatedRun) -> EvaluationObserver | None:
    """Return what samples a run's held-out rows; None without such rows, and in step 3, which has responses."""
    count, held_out = run.settings["report_samples"], run.held_out
    if held_out is None or not count or not len(held_out.phase.eval):
        return None
    seen, rows = held_out.phase.seen, held_out.phase.eval
    decode = run.tokenizer.decode if seen is None else seen.reader.counting(run.tokenizer.decode)
    texts = SampleTexts(decode, frozenset(held_out.ends), media_keeper(run.folder, held_out.phase))
    shown = sampled_rows(count, len(rows), run.settings["seed"])
    if isinstance(rows[0], SentenceRow):
        draw = open_drawing(run, held_out)
        return SentenceSamples(rows, shown, texts, draw=draw, ranks=run.model.engine.ranks)
    return RankedSamples(rows, shown, texts)


class SentenceSamples(EvaluationObserver):
    """draw: makes responses; None: samples have none."""

    def __init__(
        self,
        rows: Sequence[SentenceRow],
        shown: list[int],
        texts: SampleTexts,
        *,
        draw: GreedyDrawing | None,
        ranks: Ranks,
    ) -> None:
        self._rows, self._shown, self._texts = rows, shown, texts
        self._draw, self._ranks = draw, ranks

    def wanted(self, *, around_training: bool) -> Sequence[int]:
        return self._shown

    def scored(self, scores: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
        rows = {index: self._rows[index] for index in self._shown}
        drawn = {} if self._draw is None else self._draw(rows, self._ranks)
        return sentence_samples(rows, scores, drawn, self._texts)


class RankedSamples(EvaluationObserver):
    """Before and after training it takes enough rows to find the pairs that are judged worst."""

    def __init__(self, rows: Sequence[Any], shown: list[int], texts: SampleTexts) -> None:
        self._rows, self._shown, self._texts = rows, shown, texts

    def wanted(self, *, around_training: bool) -> Sequence[int]:
        others: Sequence[int] = range(min(len(self._rows), MOST_ROWS)) if around_training else ()
        return list(dict.fromkeys([*self._shown, *others]))

    def scored(self, scores: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
        return ranked_samples(self._rows, scores, self._texts)
