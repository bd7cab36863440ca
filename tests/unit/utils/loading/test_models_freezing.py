"""Weights that a model folder names stay as they are; a model of text has no projector that could be frozen."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.base.errors import ThreestepError
from training.utils.loading.models import FROZEN, freeze_named, freeze_parts
from training.utils.models.settings import ModelSettings

NORM, PROJECTION = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


def trained(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def naming(folder, *names):
    (folder / FROZEN).write_text("".join(f"{name}\n" for name in names))
    return ModelSettings(str(folder))


def test_a_text_model_has_no_projector_to_freeze():
    model = tiny_causal_lm("llama")
    freeze_parts(model, ModelSettings("m"))
    assert trained(model) == {name for name, _ in model.named_parameters()}
    with pytest.raises(ThreestepError, match="^--freeze_projector expects a model of images and text .* got LlamaFor"):
        freeze_parts(model, ModelSettings("m", freeze_projector=True))


def test_weights_that_the_folder_names_do_not_train(tmp_path, capsys):
    model = tiny_causal_lm("llama")
    freeze_named(model, ModelSettings(str(tmp_path)), False)  # which names none
    assert trained(model) == {name for name, _ in model.named_parameters()}
    freeze_named(model, naming(tmp_path, NORM, PROJECTION), False)
    assert trained(model) == {name for name, _ in model.named_parameters()} - {NORM, PROJECTION}
    assert f"model: 2 of 21 weights stay as they are ({tmp_path / FROZEN})" in capsys.readouterr().out


def test_a_name_that_the_model_lacks(tmp_path):
    """A scalar model lacks the output layer of its language model, and nothing else."""
    scalar = tiny_scalar_model("llama")
    freeze_named(scalar, naming(tmp_path, NORM, "lm_head.weight"), False)
    assert trained(scalar) == {name for name, _ in scalar.named_parameters()} - {NORM}
    with pytest.raises(ThreestepError, match=f"{FROZEN} names model.nor, which LlamaForSequenceClassification lacks"):
        freeze_named(scalar, naming(tmp_path, "model.nor"), False)


@pytest.mark.parametrize("scores", [False, True])
def test_adapters_train_on_a_model_that_is_frozen_as_a_whole(tmp_path, scores):
    """Also below a new head, which the language model that was frozen does not have."""
    model = tiny_causal_lm("llama")
    settings = naming(tmp_path, *(name for name, _ in model.named_parameters()))
    adapted = add_lora(tiny_scalar_model("llama") if scores else model, Lora(2))
    freeze_named(adapted, settings, False)
    assert {name for name in trained(adapted) if ".lora_" not in name} == ({"score.weight"} if scores else set())


def test_adapters_do_not_move_what_is_frozen(tmp_path):
    model, other = tiny_causal_lm("llama"), tiny_causal_lm("llama")
    settings = naming(tmp_path, PROJECTION)
    with pytest.raises(ThreestepError, match=f"^adapters train on {PROJECTION} and 0 other weights that are frozen"):
        freeze_named(add_lora(model, Lora(2)), settings, False)
    freeze_named(add_lora(other, Lora(2, lora_module_name="v_proj")), settings, False)


def test_new_tokens_need_embeddings_that_train(tmp_path):
    settings = naming(tmp_path, "model.embed_tokens.weight")
    with pytest.raises(ThreestepError, match="^the tokenizer gained tokens, whose embeddings must be trained, and the"):
        freeze_named(tiny_causal_lm("llama"), settings, True)
