"""The evaluation program: its flags, and models that others made score as plain transformers says."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import SENTENCES, train_tokenizer
from tests.tiny_models import tiny_causal_lm, tiny_scalar_model
from training.step2_reward.evaluate import EvaluateArguments, load_scorer
from training.step2_reward.pair_file import read_pairs
from training.utils.data.arguments import DataArguments
from training.utils.engine.startup import Ranks
from training.utils.models.loading import load_tokenizer
from training.utils.run.errors import Mistakes, ThreestepError

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
PAIRS = [("Human: What is 2 + 3? Assistant:", " 5.", " It is 4, or more."), ("Human: hi Assistant:", " HELLO", " no")]
DATA = DataArguments(max_seq_len=64)


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    EvaluateArguments(**{"model_name_or_path": "m", **given}).validate(mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_name_or_path": ""}, "--model_name_or_path expects a model folder or hub name, got nothing"),
        ({"split": "test"}, "--split expects one of eval, train, got 'test'"),
        ({"score_file": "no_such.jsonl"}, "--score_file: there is no file 'no_such.jsonl'"),
        ({"output": "scores.jsonl"}, "--output is for the scores of --score_file, and none is given; an evaluation is"),
        ({"dtype": "fp8"}, "--dtype expects one of fp32, bf16, fp16, got 'fp8'"),
        ({"zero_stage": 5}, "--zero_stage expects 0, 1, 2 or 3, got 5"),
        ({"per_device_eval_batch_size": 0}, "--per_device_eval_batch_size expects a whole number from 1 up, got 0"),
        ({"max_tokens_per_micro_batch": 0}, "--max_tokens_per_micro_batch expects a whole number from 1 up, got 0"),
    ],
)
def test_a_flag_that_cannot_be(given, words):
    (sentence,) = sentences(**given)
    assert sentence.startswith(words)


def test_the_defaults_are_sound(tmp_path):
    assert sentences() == []
    (tmp_path / "pairs.jsonl").write_text("")
    assert sentences(score_file=str(tmp_path / "pairs.jsonl"), output="x.jsonl") == []


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
    how = EvaluateArguments(folder, padded=padded, per_device_eval_batch_size=2)
    found = load_scorer(how, DATA, tokenizer, ALONE)(pairs.rows).score_R.tolist()

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
    how = EvaluateArguments(str(tmp_path / "model"))
    with pytest.raises(ThreestepError, match="holds LlamaForCausalLM, and a model for sequence classification was"):
        load_scorer(how, DATA, tiny_tokenizer, ALONE)


def test_two_labels_are_refused(tmp_path, tiny_tokenizer):
    tiny_scalar_model("llama", vocab_size=len(tiny_tokenizer), num_labels=2).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ThreestepError, match="scores 2 labels, and a reward model scores one"):
        load_scorer(EvaluateArguments(str(tmp_path / "model")), DATA, tiny_tokenizer, ALONE)


def test_a_model_that_cannot_pack_is_read_padded_and_says_so(tmp_path, tiny_tokenizer, capsys):
    tiny_scalar_model("bloom", vocab_size=len(tiny_tokenizer)).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    load_scorer(EvaluateArguments(str(tmp_path / "model")), DATA, tiny_tokenizer, ALONE)
    assert capsys.readouterr().out.startswith("warning: BloomForSequenceClassification is read on padded rows: ")
