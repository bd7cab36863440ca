"""Loading, and every mistake that it tells in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import SENTENCES, train_tokenizer
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from training.utils.layout.documents import TokenSequence
from training.utils.layout.rows import padded_rows
from training.utils.models.loading import (
    add_tokens,
    check_positions,
    load_causal_lm,
    load_config,
    load_scalar_model,
    load_tokenizer,
    model_files,
    same_tokenizer,
    set_dropout,
    with_pad_apart,
)
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import ScalarModel
from training.utils.run.errors import ThreestepError


def edit_json(path: str | Path, **changes) -> None:
    values = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def test_a_tokenizer_is_loaded_from_the_models_own_folder(save_folder, tiny_tokenizer):
    loaded = load_tokenizer(save_folder())
    assert loaded.get_vocab() == tiny_tokenizer.get_vocab()
    assert loaded.padding_side == "right"


def test_no_pad_token_names_the_flag(save_folder):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None)
    with pytest.raises(ThreestepError, match=r"has no pad token; name one .*--pad_token '<\|endoftext\|>'"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, "<|endoftext|>").pad_token == "<|endoftext|>"
    assert load_tokenizer(folder, end_may_pad=True).pad_token == "<|endoftext|>"
    assert load_tokenizer(save_folder(), end_may_pad=True).pad_token == "<|pad|>"
    with pytest.raises(ThreestepError, match="--pad_token expects a token of the tokenizer in .*, got 'no such'"):
        load_tokenizer(folder, "no such")


def test_the_unknown_token_may_pad(save_folder):
    """Users of Llama 2 pad with <unk>."""
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None, unk_token="!")
    assert load_tokenizer(folder, "!").pad_token == "!"
    with pytest.raises(ThreestepError, match="--pad_token expects a token of the tokenizer in .*, got 'no such'"):
        load_tokenizer(folder, "no such")


def test_no_end_token(save_folder):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", eos_token=None)
    with pytest.raises(ThreestepError, match="has no end-of-sequence token; set eos_token"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda path: load_causal_lm(ModelSettings(path), torch.float32, 1)], ids=["tok", "model"]
)
def test_folders_that_are_none(load, tmp_path):
    with pytest.raises(ThreestepError, match="the model folder '.*nowhere' does not exist"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ThreestepError, match=r"the model folder '\./nowhere' does not exist"):
        load("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ThreestepError, match="holds no config.json, so it is not a model folder"):
        load(str(tmp_path / "empty"))


def test_a_name_that_no_hub_has(tiny_tokenizer):
    for load in (
        lambda: load_causal_lm(ModelSettings("no/such-model"), torch.float32, 1),
        lambda: load_scalar_model(ModelSettings("no/such-model"), torch.float32, tiny_tokenizer, must_have_head=True),
    ):
        with pytest.raises(ThreestepError, match="no model could be loaded from 'no/such-model': "):
            load()
    with pytest.raises(ThreestepError, match="no tokenizer could be loaded from 'no/such-model': "):
        load_tokenizer("no/such-model")


def test_pickled_weights_are_refused(save_folder, tiny_tokenizer):
    folder = save_folder()
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer))
    torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")
    Path(f"{folder}/model.safetensors").unlink()
    with pytest.raises(ThreestepError, match="no model could be loaded from .*safetensors"):
        load_causal_lm(ModelSettings(folder), torch.float32, len(tiny_tokenizer))


def test_a_language_model_keeps_its_weights_and_takes_the_dtype(save_folder, tiny_tokenizer):
    folder = save_folder()
    model = load_causal_lm(ModelSettings(folder), torch.bfloat16, len(tiny_tokenizer))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    own = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer)).lm_head.weight
    assert torch.equal(model.lm_head.weight, own.bfloat16())


def test_a_vocabulary_larger_than_the_embedding(save_folder, tiny_tokenizer):
    folder = save_folder(vocab_size=len(tiny_tokenizer) - 1)
    with pytest.raises(ThreestepError, match=rf"has {len(tiny_tokenizer)} tokens and its model embeds"):
        load_causal_lm(ModelSettings(folder), torch.float32, len(tiny_tokenizer))
    folder = save_folder("reward", scalar=True, vocab_size=len(tiny_tokenizer) - 1)
    with pytest.raises(ThreestepError, match="tokens and its model embeds"):
        load_scalar_model(ModelSettings(folder), torch.float32, tiny_tokenizer, must_have_head=True)


def test_a_language_model_where_a_reward_model_is_expected(save_folder, tiny_tokenizer):
    """Its scalar head would be random: DeepSpeed-Chat's rw_eval.py scored with such a head for a year."""
    settings = ModelSettings(save_folder())
    with pytest.raises(ThreestepError, match="expected a model for sequence classification, got LlamaForCausalLM"):
        load_scalar_model(settings, torch.float32, tiny_tokenizer, must_have_head=True)
    made_up = load_scalar_model(settings, torch.float32, tiny_tokenizer, must_have_head=False)
    assert made_up.score.weight.shape == (1, 32)


def test_a_classifier_of_several_labels_is_no_reward_model(save_folder, tiny_tokenizer):
    folder = save_folder(scalar=True, num_labels=3)
    with pytest.raises(ThreestepError, match="expected a reward model with one label, got 3 labels"):
        load_scalar_model(ModelSettings(folder), torch.float32, tiny_tokenizer, must_have_head=True)


def test_a_reward_model_comes_back(save_folder, tiny_tokenizer):
    folder = save_folder(scalar=True)
    model = load_scalar_model(ModelSettings(folder), torch.float32, tiny_tokenizer, must_have_head=True)
    own = tiny_scalar_model("llama", vocab_size=len(tiny_tokenizer))
    assert torch.equal(model.score.weight, own.score.weight)
    assert model.config.pad_token_id == tiny_tokenizer.pad_token_id


def test_where_pad_was_eos_the_embeddings_grow_and_eos_trains(save_folder):
    """torch gives the embedding of `padding_idx` no gradient, and the score is read at eos."""
    tokenizer = train_tokenizer(SENTENCES, pad_is_eos=True)
    eos, size = tokenizer.eos_token_id, len(tokenizer)
    folder = save_folder(tokenizer=tokenizer, vocab_size=size)
    tokenizer = with_pad_apart(load_tokenizer(folder), None)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("<|pad|>", size, size + 1)
    model = load_scalar_model(ModelSettings(folder), torch.float32, tokenizer, must_have_head=False)
    assert model.config.vocab_size >= size + 1 and model.config.vocab_size % 8 == 0
    assert model.config.pad_token_id == size
    own = tiny_causal_lm("llama", vocab_size=size, pad_token_id=eos)
    assert torch.equal(model.get_input_embeddings().weight[:size], own.get_input_embeddings().weight)
    ids = torch.tensor([5, 6, eos])
    ScalarModel(model)(padded_rows([TokenSequence(ids, torch.zeros(3, dtype=torch.bool))], size)).sum().backward()
    assert model.get_input_embeddings().weight.grad[eos].abs().max() > 0


def test_a_pad_token_that_ends_no_response_stays(tiny_tokenizer, tiny_tokenizer_pad_is_eos):
    assert with_pad_apart(tiny_tokenizer, None).pad_token == "<|pad|>"
    size = len(tiny_tokenizer)
    assert len(with_pad_apart(tiny_tokenizer, None)) == size
    other_end = train_tokenizer(SENTENCES, pad_is_eos=True)
    assert with_pad_apart(other_end, "!").pad_token == "<|endoftext|>"  # responses end with another token
    ends_with_pad = train_tokenizer(SENTENCES)
    ends_with_pad.pad_token = "!"
    assert with_pad_apart(ends_with_pad, "!").pad_token == "<|pad|>"


def test_tokenizers_that_may_meet():
    one = train_tokenizer(SENTENCES)
    same_with_pad_is_eos = train_tokenizer(SENTENCES)
    same_with_pad_is_eos.pad_token = same_with_pad_is_eos.eos_token
    grown = with_pad_apart(train_tokenizer(SENTENCES, pad_is_eos=True), None)
    assert same_tokenizer(one, train_tokenizer(SENTENCES))
    assert same_tokenizer(one, same_with_pad_is_eos) and same_tokenizer(same_with_pad_is_eos, one)
    assert same_tokenizer(grown, train_tokenizer(SENTENCES, pad_is_eos=True))
    assert same_tokenizer(train_tokenizer(SENTENCES, pad_is_eos=True), grown)


def test_tokenizers_that_differ():
    one = train_tokenizer(SENTENCES)
    assert not same_tokenizer(one, train_tokenizer(SENTENCES[:2]))
    assert not same_tokenizer(one, train_tokenizer(SENTENCES, vocab_size=len(one) - 5))
    as_many = [train_tokenizer(sentences, vocab_size=290) for sentences in (SENTENCES[:2], SENTENCES[2:])]
    assert len(as_many[0]) == len(as_many[1]) and not same_tokenizer(*as_many)
    other_end = train_tokenizer(SENTENCES)
    other_end.eos_token = "!"
    assert not same_tokenizer(one, other_end)


def test_positions_by_the_configuration_alone(tmp_path):
    for family in ("llama", "gpt2"):
        folder = tmp_path / family
        tiny_causal_lm(family).config.save_pretrained(folder)  # no weights
        check_positions(ModelSettings(str(folder)), 128, "--max_seq_len")
        with pytest.raises(
            ThreestepError,
            match=f"--max_seq_len allow sequences of 129 tokens and the model '{folder}' has 128 positions; lower them",
        ):
            check_positions(ModelSettings(str(folder)), 129, "--max_seq_len")


def test_code_of_a_model_runs_where_it_is_asked_for(save_folder, tmp_path, monkeypatch):
    """Not otherwise, nor is anybody asked at the terminal."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save_folder()
    marker = tmp_path / "ran"
    code = "from transformers import LlamaConfig\n" + f"open({str(marker)!r}, 'w').close()\n"
    (Path(folder) / "own.py").write_text(code + "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n")
    edit_json(f"{folder}/config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (Path(folder) / "tokenizer_config.json").write_text(
        json.dumps(
            json.loads((Path(folder) / "tokenizer_config.json").read_text())
            | {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
        )
    )
    asked = monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked at the terminal"))
    assert asked is None
    for load in (
        lambda: load_config(folder),
        lambda: load_tokenizer(folder),
        lambda: load_causal_lm(ModelSettings(folder), torch.float32, 1),
    ):
        with pytest.raises(ThreestepError, match="comes with Python code of its own, .* --trust_remote_code true"):
            load()
    assert not marker.exists()
    assert load_config(folder, trust_remote_code=True).model_type == "own" and marker.exists()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "gemma2"])
def test_dropout_is_set_everywhere(family):
    changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1} if family == "gpt2" else {}
    changes = {"dropout": 0.1, "attention_dropout": 0.1} if family == "opt" else changes
    model = tiny_causal_lm(family, **changes)
    ids = torch.arange(3, 15)[None]

    def differs() -> bool:
        model.train()
        with torch.no_grad():
            return not torch.equal(model(ids).logits, model(ids).logits)

    set_dropout(model, 0.0)
    assert not differs()
    set_dropout(model, 0.5)
    assert differs()
    set_dropout(model, 0.0)
    assert not differs()


def test_dropout_comes_by_the_settings(save_folder, tiny_tokenizer):
    folder = save_folder(family="gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    plain = load_causal_lm(ModelSettings(folder), torch.float32, len(tiny_tokenizer))
    assert plain.config.resid_pdrop == 0.1
    without = load_causal_lm(ModelSettings(folder, dropout=0.0), torch.float32, len(tiny_tokenizer))
    assert all(module.p == 0.0 for module in without.modules() if isinstance(module, torch.nn.Dropout))


def test_gradient_checkpointing_changes_no_gradient(save_folder, tiny_tokenizer):
    folder = save_folder()
    gradients = []
    for checkpointing in (False, True):
        settings = ModelSettings(folder, gradient_checkpointing=checkpointing)
        model = load_causal_lm(settings, torch.float32, len(tiny_tokenizer)).train()
        assert model.is_gradient_checkpointing == checkpointing
        model(torch.arange(3, 15)[None], use_cache=False).logits.square().mean().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_files_of_a_model(tmp_path, monkeypatch):
    """Of a folder, and of a hub name the folder that it was put into."""
    for name in ("model-2.safetensors", "model-1.safetensors", "config.json", "tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text("")
    wanted = [str(tmp_path / name) for name in ("config.json", "model-1.safetensors", "model-2.safetensors")]
    assert model_files(str(tmp_path)) == wanted

    def cached_file(name: str, file: str, local_files_only: bool) -> str:
        assert (name, file, local_files_only) == ("an/owner-model", "config.json", True)
        return str(tmp_path / file)

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    assert model_files("an/owner-model") == wanted


TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]


def test_added_tokens_are_one_token_each_and_stay_in_the_text():
    tokenizer = train_tokenizer(SENTENCES)
    size = len(tokenizer)
    assert add_tokens(tokenizer, TAGS) == 4 and len(tokenizer) == size + 4
    ids = tokenizer("Think.<Parallel><Path> 5</Path></Parallel>", add_special_tokens=False)["input_ids"]
    assert [token for token in ids if token >= size] == tokenizer.convert_tokens_to_ids(TAGS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Think.<Parallel><Path> 5</Path></Parallel>"
    assert add_tokens(tokenizer, TAGS) == 0 and len(tokenizer) == size + 4


def test_a_word_of_the_vocabulary_becomes_one_token_everywhere():
    """In the vocabulary, and yet cut by the pre-tokenizer where it stands in a text."""
    tokenizer = train_tokenizer(SENTENCES)
    word = next(token for token in tokenizer.get_vocab() if token.isalpha() and len(token) > 3)
    assert add_tokens(tokenizer, [word]) == 0
    assert tokenizer.convert_tokens_to_ids(word) in tokenizer(f"a{word}b", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_embeddings_grow_to_added_tokens_around_their_mean(save_folder, family):
    """GPT-2 and OPT tie input and output; here Llama does not."""
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(family=family, tokenizer=tokenizer)
    size = len(tokenizer)
    added = add_tokens(tokenizer, TAGS)
    before = load_causal_lm(ModelSettings(folder), torch.float32, size)
    after = load_causal_lm(ModelSettings(folder), torch.float32, len(tokenizer), added)
    assert after.config.vocab_size == len(tokenizer) == size + 4  # no row that could be sampled and is no token
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, name)().weight.detach() for model in (before, after))
        assert new.shape[0] == size + 4 and torch.equal(new[:size], old)
        # rows of a multivariate normal of a billionth of the old covariance: within 1e-3 of the spread
        assert float((new[size:] - old.mean(0)).abs().max()) < 1e-3 * float(old.std())
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits[..., :size])


def test_spare_rows_serve_added_tokens(save_folder):
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(tokenizer=tokenizer, vocab_size=len(tokenizer) + 10)
    added = add_tokens(tokenizer, TAGS)
    model = load_causal_lm(ModelSettings(folder), torch.float32, len(tokenizer), added)
    assert model.config.vocab_size == len(tokenizer) + 6


def test_a_tokenizer_that_was_too_large_before_is_still_refused(save_folder):
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(tokenizer=tokenizer, vocab_size=len(tokenizer) - 1)
    added = add_tokens(tokenizer, TAGS)
    size = len(tokenizer) - 4
    with pytest.raises(ThreestepError, match=f"has {size} tokens and its model embeds {size - 1}"):
        load_causal_lm(ModelSettings(folder), torch.float32, len(tokenizer), added)


@pytest.mark.parametrize("scalar", [False, True])
def test_added_tokens_train_beside_lora(save_folder, scalar):
    """Frozen, four tags would keep one embedding for good."""
    tokenizer = train_tokenizer(SENTENCES)
    folder = save_folder(tokenizer=tokenizer)
    added = add_tokens(tokenizer, TAGS)

    def trains(added: int) -> set[str]:
        settings = ModelSettings(folder, lora_dim=2)
        if scalar:
            model = load_scalar_model(settings, torch.float32, tokenizer, must_have_head=False, added_tokens=added)
        else:
            model = load_causal_lm(settings, torch.float32, len(tokenizer) - 4 + added, added)
        return {name for name, part in model.named_parameters() if part.requires_grad and "lora" not in name}

    head = {"score.weight"} if scalar else set()
    assert trains(0) == head
    assert trains(added) == {"model.embed_tokens.weight", "score.weight" if scalar else "lm_head.weight"}
