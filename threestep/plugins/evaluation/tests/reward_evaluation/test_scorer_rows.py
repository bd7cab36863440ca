"""Reward models that others made score as plain transformers says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from threestep.plugins.evaluation.reward_evaluation.pair_file import read_pairs
from threestep.plugins.evaluation.reward_evaluation.scorer import ScorerSettings, load_scorer, without_end
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.loading.tokenizers import load_tokenizer

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
    assert capsys.readouterr().out.startswith("warning: BloomForSequenceClassification reads padded rows: ")


def test_the_end_token_is_left_out():
    responses = tuple(np.array(ids, np.int32) for ids in ([7, 0], [0], [7, 8]))
    row = ResponsesRow(0, np.array([5], np.int32), responses)
    assert [ids.tolist() for ids in without_end(row, 0).response_ids] == [[7], [0], [7, 8]]
