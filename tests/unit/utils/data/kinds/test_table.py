"""The table of kinds, and a kind that is not there yet."""

from __future__ import annotations

from typing import Any

import pytest

from training.utils.contracts.rows import PHASES
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.ranked import Ranked
from training.utils.data.kinds.table import KINDS, kind_of


def test_each_phase_has_a_kind():
    assert [kind_of(phase).name for phase in PHASES] == ["sentences", "ranked", "prompts"]
    assert [kind_of(phase).phase for phase in PHASES] == list(PHASES)
    assert kind_of("ranked") is kind_of(2) and len({kind.key for kind in KINDS.values()}) == len(KINDS)


class Marked(Ranked):
    """Single responses that are marked."""

    name = "marked"
    key = "2_marked"
    responses = ("chosen",)
    dropped_marks = {None: "unmarked"}
    columns = ()
    hints = {"unmarked": "mark them"}

    def responses_of(self, mark: bool | None) -> tuple[str, ...]:
        return ("chosen",) if mark else ("rejected",)

    def carried(self, raw: Any, sample: Any, read: Any, source: str) -> dict[str, Any]:
        return {}


@pytest.fixture
def marked(monkeypatch):
    monkeypatch.setitem(KINDS, "marked", Marked())


def test_a_kind_of_marked_responses_is_a_class(marked, flags, tiny_tokenizer):
    rows = [{"prompt": f"Say {i}.", "completion": f" {i}", "label": i % 2 == 0} for i in range(12)]
    data = flags(rows, data_split="0,1,0", eval_fraction=0.0)
    built = build_phase("marked", data, tiny_tokenizer, seed=1)
    texts = {tiny_tokenizer.decode(row.response_ids[0][:-1]) for row in built.train}
    assert texts == {f" {i}" for i in range(12)} and "phase2_marked" in built.train.path
    assert build_phase("marked", data, tiny_tokenizer, seed=1).report.resumed


def test_rows_without_a_mark_are_dropped_with_the_kinds_advice(marked, flags, tiny_tokenizer):
    data = flags([{"prompt": "a", "completion": "b"}] * 3, data_split="0,1,0", eval_fraction=0.0)
    with pytest.raises(Exception, match=r"all 3 rows of .* were dropped \(3 unmarked\); mark them"):
        build_phase("marked", data, tiny_tokenizer, seed=1)
