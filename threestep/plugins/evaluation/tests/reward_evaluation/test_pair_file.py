"""A file of pairs: every row in its place, what cannot be scored is named, one line a pair."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import data_flags
from threestep.plugins.evaluation.reward_evaluation.pair_file import PairFile, read_pairs, write_scores
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.data.arguments import DataArguments
from training.utils.preference.evaluation import ScoredResponses

PAIR = {"prompt": "Human: What is 2 + 3? Assistant:", "chosen": " 5.", "rejected": " It is 4."}


@pytest.fixture
def write(tmp_path):
    def write(rows) -> str:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_rows_are_tokens_in_the_order_of_the_file(write, tiny_tokenizer):
    rows = [PAIR, {**PAIR, "chosen": " 5.", "rejected": " 5."}, {**PAIR, "rejected": ""}]
    pairs = read_pairs(write(rows), DataArguments(), tiny_tokenizer)
    assert [row.row_id for row in pairs.rows] == [1, 2, 3] and pairs.left_out == {}
    for row, texts in zip(pairs.rows, rows, strict=True):
        assert tiny_tokenizer.decode(row.prompt_ids) == texts["prompt"]
        assert [tiny_tokenizer.decode(ids) for ids in row.response_ids] == [
            texts["chosen"] + "<|endoftext|>",
            texts["rejected"] + "<|endoftext|>",
        ]


def test_a_model_of_a_template_reads_pairs_by_it(write):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    user = {"role": "user", "content": "a"}
    chats = {"prompt": [user], "chosen": [{"role": "assistant", "content": " b"}],
             "rejected": [{"role": "assistant", "content": ""}]}  # fmt: skip
    for row, left_out in ((PAIR, {}), (chats, {1: "empty_response"})):
        pairs = read_pairs(write([row]), DataArguments(), tokenizer)
        assert pairs.left_out == left_out
        for own in pairs.rows:
            said = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(own.prompt_ids) == said
            assert [tokenizer.decode(ids) for ids in own.response_ids] == ["5.<|im_end|>", "It is 4.<|im_end|>"]


def test_columns_by_other_names(write, tiny_tokenizer):
    data = data_flags(prompt_column="q", chosen_column="good", rejected_column="bad")
    (row,) = read_pairs(write([{"q": "Q:", "good": " a", "bad": " b"}]), data, tiny_tokenizer).rows
    assert tiny_tokenizer.decode(row.response_ids[1]) == " b<|endoftext|>"


def test_what_does_not_fit_is_left_out_and_named(write, tiny_tokenizer):
    rows = [{**PAIR, "prompt": "Human: " + "long " * 40}, {**PAIR, "prompt": ""}, PAIR]
    pairs = read_pairs(write(rows), data_flags(max_seq_len=40), tiny_tokenizer)
    assert [row.row_id for row in pairs.rows] == [3]
    assert pairs.left_out == {1: "response_cut_to_nothing", 2: "empty_prompt"}
    with pytest.raises(ThreestepError, match=r"pair 1: a sentence of \d+ tokens, and --max_seq_len is 40"):
        read_pairs(write(rows), data_flags(max_seq_len=40, truncation="error"), tiny_tokenizer)


@pytest.mark.parametrize("name", ["chosen", "rejected"])
def test_a_missing_text_names_pair_and_flag(write, tiny_tokenizer, name):
    path = write([PAIR, {key: text for key, text in PAIR.items() if key != name}])
    with pytest.raises(ThreestepError) as caught:
        read_pairs(path, DataArguments(), tiny_tokenizer)
    assert str(caught.value) == (
        f"{path}, pair 2: expected the texts prompt, chosen and rejected, got no {name}; name its column with "
        f"--{name}_column"
    )


def test_an_empty_file(write, tiny_tokenizer):
    with pytest.raises(ThreestepError, match=r"pairs.jsonl' is empty: it has no training rows"):
        read_pairs(write([]), DataArguments(), tiny_tokenizer)


def test_a_line_a_pair(tmp_path, capsys):
    ids = np.array([3], np.int32)
    pairs = PairFile([ResponsesRow(place, ids, (ids, ids)) for place in (1, 3, 4)], {2: "empty_prompt"})
    scores = np.array([1.5, 0.25, -1.0, 0.0, 2.0, 2.0])
    scored = ScoredResponses(np.repeat([0, 1, 2], 2), scores, np.ones(6, np.int64))
    output = tmp_path / "new" / "scores.jsonl"
    write_scores(pairs, scored, str(output), is_main_rank=False)
    assert not output.exists() and capsys.readouterr().out == ""
    write_scores(pairs, scored, str(output), is_main_rank=True)
    assert capsys.readouterr().out.splitlines() == [
        "pair 1: chosen 1.5000, rejected 0.2500, gap +1.2500: chosen wins",
        "pair 2: left out, empty_prompt",
        "pair 3: chosen -1.0000, rejected 0.0000, gap -1.0000: rejected wins",
        "pair 4: chosen 2.0000, rejected 2.0000, gap +0.0000: a tie",
    ]
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"pair": 1, "chosen": 1.5, "rejected": 0.25, "gap": 1.25, "winner": "chosen"},
        {"pair": 2, "left_out": "empty_prompt"},
        {"pair": 3, "chosen": -1.0, "rejected": 0.0, "gap": -1.0, "winner": "rejected"},
        {"pair": 4, "chosen": 2.0, "rejected": 2.0, "gap": 0.0, "winner": "tie"},
    ]
