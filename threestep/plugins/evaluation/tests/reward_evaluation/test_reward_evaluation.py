"""Reward models of others score a file of pairs as plain transformers says, one line a pair; what cannot be scored."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from threestep.plugins.evaluation.reward_evaluation.__main__ import RewardEvaluationArguments, _share, main
from threestep.plugins.evaluation.reward_evaluation.pair_file import PairFile, read_pairs, write_scores
from threestep.plugins.evaluation.reward_evaluation.scorer import ScorerSettings, load_scorer, without_end
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.data.arguments import DataArguments
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.flags import note_mistakes
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.preference.evaluation import ScoredResponses


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(RewardEvaluationArguments(**{"model_name_or_path": "m", **given}), mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_name_or_path": ""}, "--model_name_or_path expects a model folder or hub name, got nothing"),
        ({"split": "test"}, "--split expects one of eval, train, got 'test'"),
        ({"score_file": "no_such.jsonl"}, "--score_file: there is no file 'no_such.jsonl'"),
        ({"output": "scores.jsonl"}, "--output needs --score_file; without it, the evaluation is"),
        ({"dtype": "fp8"}, "--dtype expects one of fp32, bf16, fp16, got 'fp8'"),
        ({"zero_stage": 5}, "--zero_stage expects a number from 0 to 3, got 5"),
        ({"per_device_eval_batch_size": 0}, "--per_device_eval_batch_size expects 1 or more, got 0"),
        ({"max_tokens_per_micro_batch": 0}, "--max_tokens_per_micro_batch expects 1 or more, got 0"),
    ],
)
def test_a_flag_that_cannot_be(given, words):
    (sentence,) = sentences(**given)
    assert sentence.startswith(words)


def test_a_place_that_takes_no_scores_is_refused_before_they_are_made(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{}\n")
    with pytest.raises(ThreestepError, match="^--output expects a file, got '.*', which is a folder; choose another$"):
        main(["--model_name_or_path", "m", "--score_file", str(pairs), "--output", str(tmp_path)])
    (tmp_path / "evaluation.json").mkdir()
    with pytest.raises(ThreestepError, match="^--output_dir expects a file, got '.*evaluation.json', which is a fold"):
        main(["--model_name_or_path", "m", "--data_path", "embedded", "--output_dir", str(tmp_path)])


def test_the_share_of_rows_that_was_scored_is_said():
    phase: Any = SimpleNamespace(train=range(36), eval=range(4))
    assert _share(phase, "eval") == (
        "scored 4 of 40 rows (--split eval); --split train --data_split 0,1,0 --eval_fraction 0 scores every training "
        "row"
    )
    phase = SimpleNamespace(train=range(40), eval=[])
    assert _share(phase, "train") == "scored 40 of 40 rows (--split train)"


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
    with pytest.raises(ThreestepError, match=r"pair 1: a text has \d+ tokens, more than --max_seq_len 40"):
        read_pairs(write(rows), data_flags(max_seq_len=40, truncation="error"), tiny_tokenizer)


@pytest.mark.parametrize("name", ["chosen", "rejected"])
def test_a_missing_text_names_pair_and_flag(write, tiny_tokenizer, name):
    path = write([PAIR, {key: text for key, text in PAIR.items() if key != name}])
    with pytest.raises(ThreestepError) as caught:
        read_pairs(path, DataArguments(), tiny_tokenizer)
    assert str(caught.value) == (
        f"{path}, pair 2: expected strings in prompt, chosen and rejected, but {name} is missing; name its column "
        f"with --{name}_column"
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


ALONE = Ranks(0, 0, 1, torch.device("cpu"))
PAIRS = [("Human: What is 2 + 3? Assistant:", " 5.", " It is 4, or more."), ("Human: hi Assistant:", " HELLO", " no")]
DATA = data_flags(max_seq_len=64)


@pytest.fixture
def save(tmp_path):
    """Save a scalar model as somebody else would, with a pad token, with eos as pad, or without any."""

    def save(family: str, pad: str) -> str:
        tokenizer = train_tokenizer(SENTENCES, pad_is_eos=pad == "eos")
        if pad == "none":
            tokenizer.pad_token = None
        config = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        model = tiny_scalar_model(family, pad_token_id=tokenizer.pad_token_id, **config)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def pairs_of(folder: str, tmp_path, tokenizer):
    import json

    path = tmp_path / "pairs.jsonl"
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_pairs(str(path), DATA, tokenizer)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_are_those_of_plain_transformers(save, tmp_path, family, pad, padded):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = save(family, pad)
    tokenizer = load_tokenizer(folder, end_may_pad=True)
    pairs = pairs_of(folder, tmp_path, tokenizer)
    settings = ScorerSettings(folder, padded=padded, per_device_eval_batch_size=2)
    found = load_scorer(settings, DATA, tokenizer, ALONE)(pairs.rows).score_R.tolist()

    plain, own = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (own.pad_token_id is None) == (pad == "none")
    expected = []
    for prompt, *responses in PAIRS:
        texts = [prompt + response + own.eos_token for response in responses]
        with torch.no_grad():
            if pad == "none":
                batches = [own(text, return_tensors="pt") for text in texts]
                expected += [float(plain(input_ids=batch["input_ids"]).logits) for batch in batches]
            else:
                batch = own(texts, padding=True, padding_side="right", return_tensors="pt")
                batch.pop("token_type_ids", None)
                expected += plain(**batch).logits[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 3) for score in found}) == 4


def test_a_language_model_is_refused(tmp_path, tiny_tokenizer):
    tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer)).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    settings = ScorerSettings(str(tmp_path / "model"))
    with pytest.raises(ThreestepError, match="expected a model for sequence classification, got LlamaForCausalLM"):
        load_scorer(settings, DATA, tiny_tokenizer, ALONE)


def test_two_labels_are_refused(tmp_path, tiny_tokenizer):
    tiny_scalar_model("llama", vocab_size=len(tiny_tokenizer), num_labels=2).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ThreestepError, match="expected a reward model with one label, got 2 labels"):
        load_scorer(ScorerSettings(str(tmp_path / "model")), DATA, tiny_tokenizer, ALONE)


def test_a_model_that_cannot_pack_is_read_padded_and_says_so(tmp_path, tiny_tokenizer, capsys):
    tiny_scalar_model("bloom", vocab_size=len(tiny_tokenizer)).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    load_scorer(ScorerSettings(str(tmp_path / "model")), DATA, tiny_tokenizer, ALONE)
    assert capsys.readouterr().out.startswith("warning: BloomForSequenceClassification uses padded rows: ")


def test_the_end_token_is_left_out():
    responses = tuple(np.array(ids, np.int32) for ids in ([7, 0], [0], [7, 8]))
    row = ResponsesRow(0, np.array([5], np.int32), responses)
    assert [ids.tolist() for ids in without_end(row, 0).response_ids] == [[7], [0], [7, 8]]
