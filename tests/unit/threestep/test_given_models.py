"""Models and tokenizers that a call is given: their folder, or why none stands for them. Runs of them:
tests/end_to_end/test_calls.py."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, LlamaModel
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.families.configs import tiny_config as tiny_config_of
from tests.support.tiny_models import tiny_config
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from threestep.given_models import folder_of_model
from training.utils.base.errors import ThreestepError
from training.utils.loading.models import FROZEN

NAME = "model_name_or_path"


class Halved(LlamaForCausalLM):
    def forward(self, input_ids=None, **others):
        output = super().forward(input_ids=input_ids, **others)
        output.logits = output.logits / 2
        return output


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(list(SENTENCES), vocab_size=384)


def made(kind=LlamaForCausalLM, change=None):
    torch.manual_seed(0)
    model = kind(tiny_config("llama", tie_word_embeddings=True)).eval()
    if change is not None:
        change(model)
    return model


def given_of(model, tokenizer, folder, name=NAME, resumes=False):
    """The folder of a model that is taken."""
    assert folder_of_model(model, tokenizer, folder, name, resumes=resumes) == str(folder / name)
    return folder / name


def state_of(model):
    """All that a call must leave as it is."""
    hooks = [len(hooks) for module in model.modules() for hooks in (module._forward_hooks, module._backward_hooks)]
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [(weight.requires_grad, weight.dtype, weight.device) for weight in model.parameters()],
        (hooks, sorted(vars(model)), model.config.to_dict(), vars(model.config).keys(), type(model)),
    )


def assert_as_it_was(model, before):
    after = state_of(model)
    assert after[1:] == before[1:]
    assert all(torch.equal(before[0][name], tensor) for name, tensor in after[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_is_its_folder(dtype, tokenizer, tmp_path, capsys):
    model = made().to(dtype).train()  # which rounds its buffers too
    before = state_of(model)
    folder = given_of(model, tokenizer, tmp_path)
    assert_as_it_was(model, before)
    assert "warning: " not in capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names and FROZEN not in names
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    read = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(weight.equal(model.get_parameter(name).float()) for name, weight in read.named_parameters())


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def share(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def up_of(model):
    return model.model.layers[0].mlp.up_proj


def set_in_attention(name, value):
    return lambda model: setattr(model.model.layers[1].self_attn, name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.register_forward_hook(lambda *_: 1 / 0), "the model has a hook"),
        (lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None), "model.norm has a hook"),
        (lambda m: m.model.norm.register_full_backward_hook(lambda *_: None), "model.norm has a hook"),
        (lambda m: m.model.embed_tokens.register_forward_hook(neftune_post_forward_hook), "model.embed_tokens has a"),
        (lambda m: m.lm_head.weight.register_hook(lambda g: g), "model.embed_tokens.weight has a gradient hook"),
        (
            lambda m: m.model.norm.weight.register_post_accumulate_grad_hook(print),
            "model.norm.weight has a gradient hook",
        ),
        (lambda m: setattr(m.model.norm, "forward", lambda x: x), "model.norm.forward is replaced"),
        (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU()), "model.layers.0.mlp.act_fn is a ReLU, not a"),
        (set_in_attention("scaling", 0.5), "model.layers.1.self_attn.scaling is 0.5, but 0."),
        (set_in_attention("attention_dropout", 0.1), "attention_dropout is 0.1, but 0.0 in its configuration"),
        (lambda m: setattr(m.config, "rms_norm_eps", 0.5), "variance_epsilon is 1e-06, but 0.5 in its configuration"),
        (lambda m: m.model.rotary_emb.inv_freq.mul_(3.0), "model.rotary_emb.inv_freq is missing from its saved files"),
        (lambda m: m.register_buffer("scale", torch.ones(1)), "scale is not a weight of its configuration"),
        (lambda m: m.model.layers.pop(1), "it lacks model.layers.1; it lacks model.layers.1.input_layernorm; it lack"),
        (untie, "lm_head.weight and model.embed_tokens.weight are two tensors, but not in its configuration"),
        (share, "0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are one tensor, but not in its"),
        (lambda m: prune.l1_unstructured(up_of(m), "weight", 0.5), "model.layers.0.mlp.up_proj has a hook"),
        (lambda m: parametrizations.weight_norm(up_of(m)), "0.mlp.up_proj is a ParametrizedLinear, not a Linear"),
    ],
)
def test_what_no_folder_holds(change, reason, tokenizer, tmp_path):
    model = made(change=change)
    before = state_of(model)
    with pytest.raises(
        ThreestepError, match=": this LlamaForCausalLM would change if it were saved and loaded again: "
    ) as refused:
        given_of(model, tokenizer, tmp_path)
    assert reason in str(refused.value)
    assert "Undo these changes, or save it together with its code (register_for_auto_class, save_" in str(refused.value)
    assert_as_it_was(model, before)
    assert not list(tmp_path.iterdir())


def test_a_part_that_shows_in_the_numbers_alone(tokenizer, tmp_path, monkeypatch):
    def attention(*arguments, **others):
        output, weights = sdpa_attention_forward(*arguments, **others)
        return output / 2, weights

    model = made()
    model.config._attn_implementation = "eager"  # which rounds otherwise
    given_of(model, tokenizer, tmp_path)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "halved", attention)
    model.config._attn_implementation = "halved"
    with pytest.raises(ThreestepError, match=r": its outputs change by 0\.\d+ \(rounding explains at most .*e-0"):
        given_of(model, tokenizer, tmp_path)


def test_settings_that_transformers_refuses_to_save_are_mended_in_the_folder(tokenizer, tmp_path, capsys):
    """Vicuna's generation settings, and sampling settings in the configuration."""

    def change(model):
        model.generation_config.temperature, model.generation_config.top_p = 0.9, 0.6
        model.config.temperature = 0.7

    model = made(change=change)
    model.config.name_or_path = model.name_or_path = ""
    before = state_of(model), model.generation_config.to_dict()
    given_of(model, tokenizer, tmp_path)
    notes = capsys.readouterr().out.splitlines()
    assert_as_it_was(model, before[0])
    assert model.generation_config.to_dict() == before[1]
    assert len(notes) == 2 and all(note.startswith("warning: 'LlamaForCausalLM': ") for note in notes)
    assert "its generation settings have temperature 0.9, top_p 0.6" in notes[0]
    read = LlamaForCausalLM.from_pretrained(tmp_path / NAME)
    assert (read.generation_config.temperature, read.generation_config.top_p) == (None, None)


def test_what_changes_no_number_is_no_reason(tokenizer, tmp_path, capsys):
    def change(model):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.remark = "mine"
        model.loss_function = print
        model(input_ids=torch.arange(4)[None], output_hidden_states=True)  # leaves hooks of transformers

    model = made(change=change)
    given_of(model, tokenizer, tmp_path)
    given_of(model, tokenizer, tmp_path, resumes=True)
    notes = capsys.readouterr().out
    assert "gradient_checkpointing=True" in notes and "warning: the model's own loss_function is ignored" in notes


@pytest.mark.parametrize("kind", [Halved, LlamaModel])
def test_a_class_that_transformers_does_not_load(kind, tokenizer, tmp_path):
    known = (
        f"its class is {kind.__module__}.{kind.__name__}, but transformers loads another class for its configuration"
    )
    with pytest.raises(ThreestepError, match=f"^--model_name_or_path: this {kind.__name__} would change .*: {known}"):
        given_of(made(kind), tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_frozen_weights_are_named(tokenizer, tmp_path, capsys):
    model = made(change=lambda model: model.model.layers[0].requires_grad_(False))
    frozen = (given_of(model, tokenizer, tmp_path) / FROZEN).read_text().split()
    assert frozen == [name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")]
    whole = made().requires_grad_(False)
    assert len((given_of(whole, tokenizer, tmp_path) / FROZEN).read_text().split()) == len(list(whole.parameters()))
    assert "the critic" not in capsys.readouterr().out
    assert not (given_of(whole, tokenizer, tmp_path, "critic_model_name_or_path") / FROZEN).exists()
    assert "the critic initialized from it is trained" in capsys.readouterr().out


def unsaved(folder):
    raise NotImplementedError("of no use")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m: setattr(m.generation_config, "num_return_sequences", 3),
            "its generation settings .* could not be saved with the model .transformers: Greedy",
        ),
        (lambda m: setattr(m, "peft_config", {}), "got a wrapped LlamaForCausalLM; pass the model with its adapters"),
        (
            lambda m: setattr(m, "is_quantized", True),
            "expects all weights in memory, but .* are quantized; pass its fol",
        ),
        (lambda m: m.to("meta"), "are on the meta device; pass its folder instead$"),
        (lambda m: setattr(m.lm_head.weight, "ds_id", 1), "are sharded; pass its folder instead$"),
        (lambda m: m.lm_head.weight.data.fill_(torch.nan), "computes nan from its loaded weights in float32; check"),
    ],
)
def test_models_that_cannot_be_taken(change, sentence, tokenizer, tmp_path):
    with pytest.raises(ThreestepError, match=sentence):
        given_of(made(change=change), tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_model(tokenizer, tmp_path):
    def refused(model, sentence, own=tokenizer):
        with pytest.raises(ThreestepError, match=f"^--model_name_or_path {sentence}"):
            folder_of_model(model, own, tmp_path, NAME, resumes=False)

    refused(3, "expects a path, a hub name or a loaded transformers model, got int$")
    refused(nn.DataParallel(made()), "expects a plain model, got a wrapped DataParallel; pass its module$")
    refused(torch.compile(made()), "expects .* got a wrapped OptimizedModule; pass its _orig_mod with torch_compile=")
    refused(SimpleNamespace(pretrained_model=made()), "expects .* pass its pretrained_model$")
    refused(made(), "is a loaded model, so it needs a tokenizer, but tokenizer is None; pass one$", None)
    refused(
        made(),
        "expects a model that can be saved, but saving this LlamaForCausalLM failed: of no use",
        SimpleNamespace(save_pretrained=unsaved),
    )


def test_a_tokenizer_is_what_its_files_hold(tokenizer, tmp_path):
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["<new>"])
    changed.chat_template = "{{ messages[0].content }}"
    given_of(made(), changed, tmp_path)

    class Upper(type(tokenizer)):
        def __call__(self, text, **others):
            return super().__call__(text.upper(), **others)

    other = copy.deepcopy(tokenizer)
    other.__class__ = Upper
    with pytest.raises(ThreestepError, match="^tokenizer: saving and reloading this Upper changes its "):
        given_of(made(), other, tmp_path)
    tokenizer.save_pretrained(tmp_path / "misread")
    config = tmp_path / "misread" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    misread = AutoTokenizer.from_pretrained(tmp_path / "misread")
    with pytest.raises(
        ThreestepError, match=r"^tokenizer: its ids differ from those of the tokenizer.json of '.*misread', bec"
    ):
        given_of(made(), misread, tmp_path)
    given_of(made(), type(tokenizer).from_pretrained(tmp_path / "misread"), tmp_path)
    unread = SimpleNamespace(save_pretrained=lambda folder: None)
    with pytest.raises(ThreestepError, match="^the saved tokenizer cannot be loaded: "):
        given_of(made(), unread, tmp_path)


def test_a_resumed_run_is_given_the_model_that_it_began_with(tokenizer, tmp_path):
    given_of(made(), tokenizer, tmp_path)
    given_of(made(), tokenizer, tmp_path, resumes=True)
    written = (tmp_path / NAME / "model.safetensors").read_bytes()
    other = made(change=lambda model: model.lm_head.weight.data.mul_(2))
    for changed, what in ((other, "model.safetensors"), (made().requires_grad_(False), FROZEN)):
        with pytest.raises(ThreestepError, match=f"is not the model that the run in .* started with .{what}.; pass"):
            given_of(changed, tokenizer, tmp_path, resumes=True)
        assert (tmp_path / NAME / "model.safetensors").read_bytes() == written
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("family", ["gpt2", "granitemoe+router", "phi3+longrope", "recurrent_gemma", "rwkv+unscaled"])
def test_what_a_forward_leaves_behind_is_no_reason(family, tokenizer, tmp_path):
    """Hooks of transformers, states, and buffers that become one tensor. The first call runs a forward."""
    model = AutoModelForCausalLM.from_config(tiny_config_of(family)).eval()
    given_of(model, tokenizer, tmp_path)
    given_of(model, tokenizer, tmp_path, resumes=True)
