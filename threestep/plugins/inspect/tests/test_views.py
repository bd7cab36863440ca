"""Rows as text: colours, columns, histogram, and texts of tokens that go on from others."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.inspect import views
from threestep.plugins.inspect.views import Style
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow

pytestmark = pytest.mark.unit

WORDS = ["One", " two", " three", "\nfour", " \x1b[31m", "你好"]


def decode(ids) -> str:
    """A word an id; the first of a text loses the space before it, as with some tokenizers."""
    return "".join(WORDS[i] for i in ids).removeprefix(" ")


def sentence(ids: list[int], loss: list[int]) -> SentenceRow:
    return SentenceRow(0, np.array(ids, np.int32), np.array(loss, bool))


def test_what_carries_loss_is_coloured_line_by_line_and_bracketed_without_colour():
    row = sentence([0, 1, 2, 3, 1], [0, 0, 1, 1, 0])
    green, end = views.COLOUR, views.COLOUR_END
    assert views.row_as_text(row, decode, Style(True, 80)) == f"One two{green} three{end}\n{green}four{end} two"
    assert views.row_as_text(row, decode, Style(False, 80)) == "One two⟦ three\nfour⟧ two"
    # A text cannot steer the terminal, and a run keeps the space that it would lose by itself.
    assert views.row_as_text(sentence([0, 4], [0, 0]), decode, Style(True, 80)) == "One \\x1b[31m"
    assert views.runs_of([0, 1, 2], [0, 1, 1], decode) == [("One", False), (" two three", True)]


def test_colours_are_for_terminals_and_off_with_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert views.terminal_style(True, 80).coloured
    assert not views.terminal_style(False, 80).coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert not views.terminal_style(True, 80).coloured


def test_the_middle_of_a_long_piece_is_left_out(monkeypatch):
    monkeypatch.setattr(views, "SHOWN_TOKENS", 4)
    monkeypatch.setattr(views, "SHOWN_CHARACTERS", 6)
    row = sentence([0, *[1] * 1000, 2, 2, 3], [0] * 3 + [1] * 1001)
    assert views.marked_runs(row, decode) == [
        ("text", [("One two two", False), (" two two\n[997 tokens left out]\n three\nfour", True)])
    ]
    assert "[997 tokens left out]" in views.row_as_text(row, decode, Style(False, 80))
    assert views.row_as_data(row, decode)["loss_texts"] == [" two" * 998 + " three three\nfour"]  # JSON has all
    pair = ResponsesRow(0, np.array([0] * 5, np.int32), (np.array([1], np.int32), np.array([2] * 6, np.int32)))
    assert views.marked_runs(pair, decode)[0][1] == [("OneOne\n[1 tokens left out]\nOneOne", False)]
    assert views.marked_runs(pair, decode)[2][1] == [(" three three\n[2 tokens left out]\n three three", True)]
    assert views.shortened("abcdefgh") == "abc\n[2 characters left out]\nfgh" and views.shortened("abcdef") == "abcdef"


def test_a_long_conversation_is_decoded_once(monkeypatch):
    """Not from its beginning for each turn."""
    decoded = []

    def counted(ids) -> str:
        decoded.append(len(ids))
        return decode(ids)

    assert len(views.runs_of([1] * 4000, [0, 1] * 2000, counted)) == 4000
    assert sum(decoded) < 4000 * 100


def test_columns_have_one_width_whatever_signs_take_two_cells():
    row = ResponsesRow(0, np.array([0, 5], np.int32), (np.array([1, 2], np.int32), np.array([5], np.int32)))
    lines = views.row_as_text(row, decode, Style(False, 66), show_layout=True).splitlines()
    assert lines[0] == "prompt, 2 tokens     | chosen, 2 tokens     | rejected, 1 tokens"
    assert lines[2] == "One你好              | ⟦ two three⟧         | ⟦你好⟧"
    # The prompt's two tokens come first; both responses stand at position 2.
    assert lines[-2] == "  segment 1: tokens 2-3, positions 2-3, sees segments: 0, 2 to predict"
    assert lines[-1] == "  segment 2: tokens 4-4, positions 2-2, sees segments: 0, 1 to predict"


def test_messages_beside_a_prompt_stand_below_each_other():
    said = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
        {"role": "tool", "content": "5"},
    ]
    columns = {"raw_prompt": said, "level": 3, "key": "é", "names": ["a"]}
    row = PromptRow(0, np.array([1], np.int32), "two", "5", columns)
    told = '\n  user: 2 + 3?\n  assistant: [{"function": {"name": "add"}}]\n  tool: 5'
    others = {"reference": "5", "level": "3", "key": "é", "names": '["a"]'}
    assert dict(views.values_beside(row)) == {"raw_prompt": told, **others}
    assert "raw_prompt: \n  user: 2 + 3?\n" in views.row_as_text(row, decode, Style(False, 80))


def test_histogram_counts_every_row_once():
    # 1 .. 20 in ranges of 2; five rows make the longest bar, of 4 signs; three make 3 * 4 / 5 = 2.4, rounded up.
    lines = views.histogram([1, 2, 2, 20, 20, 20, 20, 20], most_bars=10, width=4)
    assert len(lines) == 10
    assert lines[0] == "   1 -  2 tokens | ###  3"
    assert lines[1].endswith("|      0") and lines[-1] == "  19 - 20 tokens | #### 5"
    assert views.histogram([7, 7]) == ["  7 - 7 tokens | " + "#" * 40 + " 2"]
    assert views.histogram([]) == []


def test_a_row_id_tells_dataset_part_and_index():
    described = [
        {"name": "a", "first_row_id": 0, "training_rows": 3, "own_evaluation_rows": 2},
        {"name": "b", "first_row_id": 5, "training_rows": 1, "own_evaluation_rows": 0},
    ]
    assert views.source_of(2, described) == {"source": "a", "source_part": "training", "index": 2}
    assert views.source_of(4, described) == {"source": "a", "source_part": "evaluation", "index": 1}
    assert views.source_of(5, described) == {"source": "b", "source_part": "training", "index": 0}
