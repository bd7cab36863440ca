"""Turns of conversations: who says which token, in the table, on the page, on the terminal, in sums of shares."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.explain.explanation import Questions, explain
from threestep.plugins.explain.page import page
from threestep.plugins.explain.tests.explained_steps import PlainStep, conversations
from threestep.plugins.explain.text import as_lines
from threestep.plugins.explain.turns import parts_of, turns_of


@pytest.mark.parametrize("kind, other", [("sft", "others"), ("policy", "environment")])
def test_speakers_and_turns_of_each_sequence(kind: str, other: str):
    step = conversations(kind)
    turns = turns_of(step)
    assert turns is not None
    for sequence in range(len(step.rank_S)):
        own = step.sequence_T == sequence
        length = int(own.sum())
        assert list(turns.speaker_T[own]) == ["prompt", "model", other, *["model"] * (length - 3)]
        assert list(turns.turn_T[own]) == [0, 1, 1, *[2] * (length - 3)]


def test_a_step_without_conversations_has_no_turns():
    step = AuditedStep(PlainStep(3, "policy").made().record)
    assert turns_of(step) is None
    tokens = explain([step], Questions()).table.tokens
    assert not {"speaker", "turn"} & set(tokens)


@pytest.mark.parametrize("kind", ["sft", "policy"])
def test_the_table_the_page_and_the_terminal_have_the_turns(kind: str):
    step = conversations(kind)
    found = explain([step], Questions())
    tokens, sequences = found.table.tokens, found.table.sequences
    assert set(sequences["turns"]) == {2}
    between = tokens["place"] == 2
    assert set(tokens["role"][between]) == {"environment" if kind == "policy" else "others"}
    assert not tokens["share"][between].any()
    data = re.search(r'<script type="application/json" id="explained">(.*?)</script>', page(found))
    assert data is not None
    for sequence, own in enumerate(json.loads(data[1])["sequences"]):
        assert [part[0] for part in own["parts"]] == ["prompt", "model", *{*tokens["speaker"][between]}, "model"]
        assert sum(part[1] for part in own["parts"]) == (tokens["sequence"] == sequence).sum()
        assert sum(part[2] for part in own["parts"]) == pytest.approx(own["share"])
    line = next(line for line in as_lines(found) if "by turns of the model" in line)
    whole = found.table.figures["change"]
    first, second = (float(tokens["share"][tokens["turn"] == turn].sum()) / whole for turn in (1, 2))
    assert line == f"  by turns of the model: 1: {100 * first:.3g} %, 2: {100 * second:.3g} %"


def test_parts_follow_each_other():
    speakers = np.array(["prompt", "prompt", "model", "environment", "model", "model"], dtype=object)
    shares = np.array([0.0, 0.0, -2.0, 0.0, 1.0, 3.0])
    want = [("prompt", 2, 0.0), ("model", 1, -2.0), ("environment", 1, 0.0), ("model", 2, 4.0)]
    assert parts_of(speakers, shares) == want
