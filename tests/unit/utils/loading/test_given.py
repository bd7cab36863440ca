"""What given.json asks of a model that trains, and copies of objects that are refused. Those that a call takes:
tests/unit/threestep/test_given_models.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaForSequenceClassification

from tests.support.tiny_models import tiny_causal_lm, tiny_config
from training.utils.base.errors import ThreestepError
from training.utils.loading.given import (
    GivenModel,
    GivenObject,
    copy_of_object,
    objects_given,
    read_numbers,
    train_as_given,
    write_given,
)
from training.utils.models.adapters.lora import add_lora
from training.utils.models.settings import ModelSettings

NORM, PROJECTION = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


class Doubled(LlamaForSequenceClassification):
    """Its score is not that of its head."""

    def forward(self, *arguments, **others):
        output = super().forward(*arguments, **others)
        output.logits = output.logits * 2
        return output


class Stateful(nn.Module):
    """Copies of it compute something else."""

    factor = 1.0

    def forward(self, module, inputs, output):
        return output * self.factor

    def __deepcopy__(self, memo):
        copied = Stateful()
        copied.factor = 2.0
        return copied


def noted(folder, model, frozen=(), only_object=None):
    write_given(folder, GivenModel(type(model).__name__, tuple(frozen), only_object, (), read_numbers(model)))
    return ModelSettings(str(folder))


def scalar(kind=LlamaForSequenceClassification, outputs=1):
    torch.manual_seed(0)
    model = kind(tiny_config("llama", num_labels=outputs, pad_token_id=0)).eval()
    nn.init.normal_(model.score.weight)
    return model


def test_what_was_frozen_does_not_train(tmp_path, capsys):
    model = tiny_causal_lm("llama")
    train_as_given(model, noted(tmp_path, model, [NORM, PROJECTION]), False)
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == [PROJECTION, NORM]
    assert "weights stay as they are: they were given frozen (requires_grad)" in capsys.readouterr().out


def test_other_folders_freeze_nothing(tmp_path):
    model = tiny_causal_lm("llama")
    train_as_given(model, ModelSettings(str(tmp_path)), False)
    assert all(weight.requires_grad for weight in model.parameters())


@pytest.mark.parametrize("scores", [False, True])
def test_adapters_train_on_a_model_that_is_frozen_as_a_whole(tmp_path, scores):
    """Also below a new head, which the language model that was given does not have."""
    model = tiny_causal_lm("llama")
    settings = replace(noted(tmp_path, model, [name for name, _ in model.named_parameters()]), lora_dim=2)
    adapted = add_lora(scalar() if scores else model, settings)
    train_as_given(adapted, settings, False)
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad and ".lora_" not in name}
    assert trained == ({"score.weight"} if scores else set())


def test_adapters_do_not_move_what_was_frozen(tmp_path):
    model = tiny_causal_lm("llama")
    settings = replace(noted(tmp_path, model, [PROJECTION]), lora_dim=2)
    with pytest.raises(ThreestepError, match=f"^--lora_dim 2 trains adapters on {PROJECTION} and 0 other weights that"):
        train_as_given(add_lora(model, settings), settings, False)
    other = tiny_causal_lm("llama")
    train_as_given(add_lora(other, replace(settings, lora_module_name="v_proj")), settings, False)


def test_new_tokens_need_embeddings_that_train(tmp_path):
    model = tiny_causal_lm("llama")
    settings = noted(tmp_path, model, ["model.embed_tokens.weight"])
    with pytest.raises(ThreestepError, match="^the tokenizer gained tokens, whose embeddings must be trained, and the"):
        train_as_given(model, settings, True)


def test_gradient_hooks_are_given_to_the_weights_that_train(tmp_path):
    held, model = tiny_causal_lm("llama"), tiny_causal_lm("llama")
    held.get_parameter(NORM).register_hook(lambda gradient: gradient * 0)
    settings = noted(tmp_path, held, only_object="hooks")
    with objects_given({str(tmp_path): GivenObject(held)}):
        train_as_given(model, settings, False)
        train_as_given(model, settings, False)  # once is enough
        model(input_ids=torch.arange(5, 9)[None]).logits.sum().backward()
        assert not model.get_parameter(NORM).grad.any() and model.get_parameter(PROJECTION).grad.any()
        resized = tiny_causal_lm("llama")
        held.get_parameter("lm_head.weight").register_hook(lambda gradient: gradient)
        resized.resize_token_embeddings(70)
        with pytest.raises(
            ThreestepError, match="^the gradient hook of .*weight is for .*, and the weight is .* here; give"
        ):
            train_as_given(resized, settings, False)


def copied(folder, model, is_scalar=False, **settings):
    noted(folder, model, only_object="its class is X")
    with objects_given({str(folder): GivenObject(model)}):
        return copy_of_object(str(folder), torch.float32, ModelSettings(str(folder), **settings), is_scalar)


def test_a_copy_trains_what_its_note_does_not_freeze(tmp_path):
    """A reward model is often given frozen as a whole, and the critic that starts from it trains."""
    model = scalar().requires_grad_(False)
    assert all(weight.requires_grad for weight in copied(tmp_path, model, True).parameters())
    assert not any(weight.requires_grad for weight in model.parameters())


def test_a_copy_is_not_sharded(tmp_path, monkeypatch):
    model = tiny_causal_lm("llama")
    monkeypatch.setattr("transformers.integrations.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ThreestepError, match="; a copy of it is not sharded: use --zero_stage 2, or save it as what a"):
        copied(tmp_path, model)


def test_a_score_is_what_the_head_gives(tmp_path):
    assert type(copied(tmp_path, scalar(), True)) is LlamaForSequenceClassification
    with pytest.raises(ThreestepError, match="; its score has 2 outputs, and a reward model has one$"):
        copied(tmp_path, scalar(outputs=2), True)
    with pytest.raises(
        ThreestepError, match="; its forward makes another score than its head `score` gives at the last"
    ):
        copied(tmp_path, scalar(Doubled), True)


def test_a_copy_that_computes_something_else(tmp_path):
    model = tiny_causal_lm("llama")
    model.lm_head.register_forward_hook(Stateful())
    with pytest.raises(
        ThreestepError, match=r"; and a copy of it computes other numbers \(by .*\): its forward or a hook"
    ):
        copied(tmp_path, model)
