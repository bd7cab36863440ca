"""Models and tokenizers that a call is given: what their folder says of them, or why they cannot be taken. That they
are trained as they are: tests/end_to_end/test_given_models.py."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.tiny_models import tiny_causal_lm, tiny_config
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from threestep.given_models import folder_of_model, trained_object
from training.utils.base.errors import ThreestepError
from training.utils.loading.given import FILE, GivenObject, copy_of_object, given_in, objects_given, proven, write_given
from training.utils.models.preparers import ModelPreparer
from training.utils.models.settings import ModelSettings

NAME = "model_name_or_path"


class Halved(LlamaForCausalLM):
    """A forward of its own, also with labels."""

    def forward(self, input_ids=None, labels=None, **others):
        output = super().forward(input_ids=input_ids, **others)
        output.logits = output.logits / 2
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits[0, :-1], labels[0, 1:])
        return output


class OwnLoss(Halved):
    def forward(self, input_ids=None, labels=None, **others):
        output = super().forward(input_ids=input_ids, **others)
        output.loss = None if labels is None else output.logits.square().mean()
        return output


class Unsaved(LlamaForCausalLM):
    def save_pretrained(self, *arguments, **others):
        raise NotImplementedError("of no use")


class Arguments(LlamaForCausalLM):
    def __init__(self, config, strength):
        super().__init__(config)
        self.strength = strength


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(list(SENTENCES), vocab_size=384)


def made(kind=LlamaForCausalLM, *arguments, change=None):
    torch.manual_seed(0)
    model = kind(tiny_config("llama", tie_word_embeddings=True), *arguments).eval()
    if change is not None:
        change(model)
    return model


def given_of(model, tokenizer, folder, kind="sft", name=NAME, resumes=False):
    path, described = folder_of_model(model, tokenizer, folder, name, kind=kind, resumes=resumes)
    assert given_in(path) == described
    return described


def halve(module, inputs, output):
    return output / 2


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
def test_a_plain_model_is_its_folder(dtype, tokenizer, tmp_path):
    model = made().to(dtype).train()
    before = state_of(model)
    given = given_of(model, tokenizer, tmp_path)
    assert_as_it_was(model, before)
    assert (given.only_object, given.frozen, given.notes) == (None, (), ())
    names = {path.name for path in (tmp_path / NAME).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", FILE} <= names
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    read = LlamaForCausalLM.from_pretrained(tmp_path / NAME, dtype=dtype)
    assert proven(read, str(tmp_path / NAME), dtype, ModelSettings(str(tmp_path / NAME)), is_scalar=False) is read


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.register_forward_hook(lambda *_: None), "the model has a forward hook"),
        (lambda m: m.lm_head.register_forward_hook(halve), "lm_head has a forward hook"),
        (lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None), "model.norm has a forward hook"),
        (lambda m: m.model.norm.register_full_backward_hook(lambda *_: None), "model.norm has a backward hook"),
        (lambda m: m.lm_head.weight.register_hook(lambda g: g), "model.embed_tokens.weight has a gradient hook"),
        (lambda m: setattr(m.model.norm, "forward", lambda x: x), "model.norm.forward is replaced"),
        (
            lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ReLU()),
            "model.layers.0.mlp.act_fn is a ReLU, not a SiL",
        ),
        (
            lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5),
            "model.layers.1.self_attn.scaling is 0.5, and 0",
        ),
        (lambda m: setattr(m.config, "rms_norm_eps", 0.5), "variance_epsilon is 1e-06, and 0.5 by its configuration"),
        (
            lambda m: setattr(m.model.layers[0].self_attn, "attention_dropout", 0.1),
            "attention_dropout is 0.1, and 0.0 by",
        ),
    ],
)
def test_what_a_folder_does_not_hold(change, reason, tokenizer, tmp_path):
    model = made(change=change)
    before = state_of(model)
    assert reason in given_of(model, tokenizer, tmp_path).only_object
    assert_as_it_was(model, before)


def test_settings_that_transformers_refuses_to_save_are_mended_in_the_folder(tokenizer, tmp_path):
    """Vicuna's generation settings, and sampling settings in the configuration."""

    def change(model):
        model.generation_config.temperature, model.generation_config.top_p = 0.9, 0.6
        model.config.temperature = 0.7

    model = made(change=change)
    model.config.name_or_path = model.name_or_path = ""
    before = state_of(model), model.generation_config.to_dict()
    notes = given_of(model, tokenizer, tmp_path).notes
    assert_as_it_was(model, before[0])
    assert model.generation_config.to_dict() == before[1]
    assert len(notes) == 2 and all(note.startswith("warning: 'LlamaForCausalLM': ") for note in notes)
    assert "its settings of generation have temperature 0.9, top_p 0.6" in notes[0]
    read = LlamaForCausalLM.from_pretrained(tmp_path / NAME)
    assert (read.generation_config.temperature, read.generation_config.top_p) == (None, None)


def test_what_changes_no_number_is_no_reason(tokenizer, tmp_path):
    def change(model):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.remark = "mine"

    given = given_of(made(change=change), tokenizer, tmp_path)
    assert given.only_object is None
    assert "gradient_checkpointing=True" in given.notes[0]


def test_a_class_with_a_forward_of_its_own(tokenizer, tmp_path):
    given = given_of(made(Halved), tokenizer, tmp_path)
    assert given.only_object == f"its class is {__name__}.Halved" and given.notes == ()
    (note,) = given_of(made(OwnLoss), tokenizer, tmp_path).notes
    assert note.startswith("warning: its forward makes a loss of ") and "the run trains the latter" in note
    assert given_of(made(OwnLoss), tokenizer, tmp_path, kind="dpo").notes == ()


def test_frozen_weights_are_named(tokenizer, tmp_path):
    def change(model):
        model.model.layers[0].requires_grad_(False)

    frozen = given_of(made(change=change), tokenizer, tmp_path).frozen
    assert frozen and all(name.startswith("model.layers.0.") for name in frozen)
    whole = made().requires_grad_(False)
    assert len(given_of(whole, tokenizer, tmp_path).frozen) == len(list(whole.parameters()))
    critic = given_of(whole, tokenizer, tmp_path, "ppo", "critic_model_name_or_path")
    assert critic.frozen == () and "the critic that starts from it trains" in critic.notes[0]


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def share(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def prune(model):
    from torch.nn.utils import prune as pruning

    pruning.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            untie,
            "^lm_head.weight and model.embed_tokens.weight are two tensors in the model and one in LlamaForCausalLM",
        ),
        (
            share,
            "^model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are one tensor in the model and",
        ),
        (
            lambda m: setattr(m.generation_config, "num_return_sequences", 3),
            "its settings of generation .* could not be saved with the model: transformers says: Greedy",
        ),
        (
            prune,
            "^3 weights of the model .* are not those of LlamaForCausalLM\\(config\\), so that no folder could hold",
        ),
        (
            lambda m: nn.utils.parametrizations.weight_norm(m.model.layers[0].mlp.up_proj),
            "take parametrizations off",
        ),
        (lambda m: setattr(m, "peft_config", {}), "expects a whole model, got one with adapters; merge them first"),
        (lambda m: setattr(m, "is_quantized", True), "expects unquantized weights, got a quantized LlamaForCausalLM"),
        (lambda m: m.to("meta"), "on the meta device; load it, or give a path$"),
        (lambda m: setattr(m.lm_head.weight, "ds_id", 1), "expects whole weights, got a LlamaForCausalLM in shards"),
        (
            lambda m: m.lm_head.weight.register_post_accumulate_grad_hook(print),
            "a hook behind its gradient's accumulation, which is of another training loop",
        ),
        (lambda m: m.lm_head.weight.data.fill_(torch.nan), "^the LlamaForCausalLM computes nan; check its weights$"),
        (
            lambda m: m.model.norm.register_forward_hook(lambda _, __, out: out + torch.randn_like(out)),
            "computes other numbers in each call in eval mode",
        ),
        (
            lambda m: m.register_forward_hook(lambda *_: 1 / 0),
            r"logits \(or a score\) of token ids alone, and that of LlamaForCausalLM fails \(ZeroDivisionError",
        ),
    ],
)
def test_models_that_cannot_be_taken(change, sentence, tokenizer, tmp_path):
    with pytest.raises(ThreestepError, match=sentence):
        folder_of_model(made(change=change), tokenizer, tmp_path, NAME, kind="sft", resumes=False)
    assert not list(tmp_path.iterdir())


def test_what_is_no_model(tokenizer, tmp_path):
    def refused(model, sentence, own=tokenizer):
        with pytest.raises(ThreestepError, match=sentence):
            folder_of_model(model, own, tmp_path, NAME, kind="sft", resumes=False)

    refused(3, "expects a path, a hub name or a loaded transformers model, got int$")
    refused(nn.DataParallel(made()), "got one that an engine or DistributedDataParallel wrapped; give its .module")
    refused(torch.compile(made()), r"got one that torch.compile wrapped; give the model itself \(model._orig_mod\)")
    refused(SimpleNamespace(pretrained_model=made()), "got one with a value head around it")
    refused(made(), "is a loaded model, and tokenizer expects its tokenizer, got None$", None)
    refused(
        made(Unsaved), "^model_name_or_path expects a model that can be saved, and saving this Unsaved fails: of no use"
    )
    refused(made(Arguments, 3.0), r"^Arguments\(config\) fails \(TypeError: .*, by which its trained weights are saved")


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
    with pytest.raises(
        ThreestepError, match="^tokenizer expects one that its files hold, and this Upper, saved and read"
    ):
        given_of(made(), other, tmp_path)
    tokenizer.save_pretrained(tmp_path / "misread")
    config = tmp_path / "misread" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    misread = AutoTokenizer.from_pretrained(tmp_path / "misread")
    with pytest.raises(ThreestepError, match=r"^tokenizer makes other ids than the tokenizer.json of '.*misread': .*"):
        given_of(made(), misread, tmp_path)
    given_of(made(), type(tokenizer).from_pretrained(tmp_path / "misread"), tmp_path)
    unread = SimpleNamespace(save_pretrained=lambda folder: None)
    with pytest.raises(ThreestepError, match="^the tokenizer's files cannot be read again: "):
        given_of(made(), unread, tmp_path)


def test_a_resumed_run_is_given_the_model_that_it_began_with(tokenizer, tmp_path):
    given_of(made(), tokenizer, tmp_path)
    given_of(made(), tokenizer, tmp_path, resumes=True)
    written = (tmp_path / NAME / "model.safetensors").read_bytes()
    other = made(change=lambda model: model.lm_head.weight.data.mul_(2))
    for changed, what in (
        (other, "model.safetensors"),
        (made().requires_grad_(False), "what is frozen or of the object"),
    ):
        with pytest.raises(ThreestepError, match=f"is another model than the run in .* began with .*{what}"):
            given_of(changed, tokenizer, tmp_path, resumes=True)
        assert (tmp_path / NAME / "model.safetensors").read_bytes() == written
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


# --- what is read of such a folder


def taken(model, tokenizer, tmp_path, dtype=torch.float32, is_scalar=False, **settings):
    path, _ = folder_of_model(model, tokenizer, tmp_path, NAME, kind="sft", resumes=False)
    with objects_given({path: GivenObject(model)}):
        return copy_of_object(path, dtype, ModelSettings(path, **settings), is_scalar)


def test_a_copy_shares_nothing_and_computes_the_same(tokenizer, tmp_path):
    model = made(Halved)
    copied = taken(model, tokenizer, tmp_path, torch.bfloat16)
    assert type(copied) is Halved and copied.dtype is torch.bfloat16
    assert copied.model.rotary_emb.inv_freq.dtype is torch.float32  # buffers are not rounded
    assert not {id(part) for part in copied.parameters()} & {id(part) for part in model.parameters()}
    ids = torch.arange(5, 15)[None]
    torch.testing.assert_close(copied.float()(input_ids=ids).logits, model(input_ids=ids).logits, atol=0.05, rtol=0.05)
    assert taken(made(), tokenizer, tmp_path) is None


def test_a_hook_that_holds_the_object_is_noticed(tokenizer, tmp_path):
    def change(model):
        first = model.model.layers[1].mlp
        model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + first(inputs[0]))

    with pytest.raises(
        ThreestepError, match="still computes with model.layers.1.mlp.gate_proj.weight of the object that"
    ):
        taken(made(change=change), tokenizer, tmp_path)


def test_what_cannot_be_done_with_a_copy(tokenizer, tmp_path):
    import threading

    def lock(model):
        lock = threading.Lock()
        model.model.norm.register_forward_hook(Locked(lock))

    for model, settings, sentence in (
        (made(change=lock), {}, r"and it cannot be copied \(TypeError: cannot pickle"),
        (made(Halved), {"preparers": (ModelPreparer(), Replacing())}, "; it would be another model$"),
        (made(Halved), {"is_scalar": True}, "a reward model needs a head `score`, which it lacks"),
    ):
        with pytest.raises(ThreestepError, match=sentence):
            taken(model, tokenizer, tmp_path, **settings)


class Replacing(ModelPreparer):
    not_of_objects = "it would be another model"


class Locked:
    def __init__(self, lock):
        self.lock = lock

    def __call__(self, module, inputs, output):
        return None


def test_other_processes_cannot_take_the_object(tokenizer, tmp_path):
    path, _ = folder_of_model(made(Halved), tokenizer, tmp_path, NAME, kind="sft", resumes=False)
    with pytest.raises(
        ThreestepError, match="was a Halved of a Python program, which no folder can stand for: its class"
    ):
        copy_of_object(path, torch.float32, ModelSettings(path), False)


def test_a_folder_with_other_numbers_is_not_taken_for_the_object(tokenizer, tmp_path):
    """A buffer that is in no file: in this process a copy of the object is trained, elsewhere nothing."""
    model = made(change=lambda model: model.model.rotary_emb.inv_freq.mul_(3.0))
    path, _ = folder_of_model(model, tokenizer, tmp_path, NAME, kind="sft", resumes=False)
    read, settings = LlamaForCausalLM.from_pretrained(path), ModelSettings(path)
    with pytest.raises(
        ThreestepError, match=r"its files give other numbers \(by .*\), so that a part of it is in no file"
    ):
        proven(read, path, torch.float32, settings, is_scalar=False)
    held = GivenObject(model)
    with objects_given({path: held}):
        copied = proven(read, path, torch.float32, settings, is_scalar=False)
    assert held.is_loaded and copied is not read and copied is not model
    assert copied.model.rotary_emb.inv_freq.equal(model.model.rotary_emb.inv_freq)


def test_a_damaged_note(tokenizer, tmp_path):
    given = given_of(made(), tokenizer, tmp_path)
    (tmp_path / NAME / FILE).write_text('{"kind": "x"}')
    with pytest.raises(ThreestepError, match=f"{FILE} is damaged .*; call the run from Python again, which writes it$"):
        given_in(str(tmp_path / NAME))
    write_given(tmp_path / NAME, given)
    assert given_in(str(tmp_path / NAME)) == given
    assert given_in(str(tmp_path)) is None


def test_trained_weights_are_put_into_a_copy_of_the_object(tmp_path):
    model, trained = made(Halved), made(Halved, change=lambda model: model.model.norm.weight.data.fill_(2.0))
    trained.resize_token_embeddings(70)
    trained.save_pretrained(tmp_path)
    result = trained_object(GivenObject(model), tmp_path)
    assert type(result) is Halved and result is not model and result.model.norm.weight.eq(2.0).all()
    assert result.get_input_embeddings().weight.shape[0] == 70 and model.get_input_embeddings().weight.shape[0] == 64
    assert result.lm_head.weight is result.model.embed_tokens.weight


def test_the_tiny_family_of_the_tests_is_taken(tokenizer, tmp_path):
    assert given_of(tiny_causal_lm("gpt2"), tokenizer, tmp_path).only_object is None
