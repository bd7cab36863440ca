"""Weights that are not those of the model are refused by name, before any is read; what is new or unused is said."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.forked_programs import run_python
from tests.support.tiny_models import FAMILIES, PADDED_FAMILIES
from training.utils.base.errors import ThreestepError
from training.utils.loading import rehearsal
from training.utils.loading.configurations import load_config
from training.utils.loading.judgement import RequestedModel
from training.utils.loading.models import load_causal_lm, load_scalar_model
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.settings import ModelSettings

UP = "model.layers.0.mlp.up_proj.weight"
SCALAR = {"scalar": True}
JUDGE = {"scalar": True, "must_have_head": True}
NEW = {"scalar": True, "new_head": True}


def load(folder: str, scalar: bool = False, must_have_head: bool = False, new_head: bool = False):
    tokenizer, settings = load_tokenizer(folder), ModelSettings(folder, new_head=new_head)
    if scalar:
        return load_scalar_model(settings, torch.float32, tokenizer, must_have_head=must_have_head)
    return load_causal_lm(ModelSettings(folder), torch.float32, len(tokenizer))


def refused(folder: str, words: str, **how: bool) -> str:
    with pytest.raises(ThreestepError, match=words) as mistake:
        load(folder, **how)
    assert "\n" not in str(mistake.value) and folder in str(mistake.value)
    return str(mistake.value)


def command_of(sentence: str, out: Path) -> None:
    """Run the command `python -c "..."` of a sentence, which writes OUT."""
    code = shlex.split(re.search(r"python -c \".+\"", sentence)[0])[2].replace("'OUT'", f"'{out}'")
    ran = run_python(["-c", code])
    assert ran.returncode == 0, ran.stderr


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def same(tensors):
    return tensors


def without(*names: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def renamed(rename: Callable[[str], str]) -> Change:
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def replaced(old: str, new: str) -> Change:
    return renamed(lambda name: name.replace(old, new))


def more(**shapes: tuple[int, ...]) -> Change:
    """Tensors of ones beside the others; `__` is a point."""
    given = {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}
    return lambda tensors: {**tensors, **given}


def adapters(tensors):
    renamed = {name.replace("q_proj.", "q_proj.base_layer."): tensor for name, tensor in tensors.items()}
    return {**renamed, "model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 32)}


def cut(tensors):
    return {name: tensor[:-1].clone() if "up_proj" in name else tensor for name, tensor in tensors.items()}


def other_head(tensors):
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1.0}


def stored_as(dtype: torch.dtype) -> Change:
    return lambda tensors: tensors | {UP: tensors[UP].to(dtype)}


def several(tensors):
    """As Qwen2.5-Math-RM's: no one row of weights scores as it does."""
    shapes = {"score.0.weight": (32, 32), "score.0.bias": (32,), "score.2.weight": (1, 32), "score.2.bias": (1,)}
    kept = {name: tensor for name, tensor in tensors.items() if name != "score.weight"}
    return kept | {name: torch.zeros(shape) for name, shape in shapes.items()}


WRAPPED = r"tensors contain a wrapper's '{0}', such as {0}(\S+), where .* has \1; .*rename them"
RANDOM = (
    r"holds \d+ tensors but lacks (the tensor|2 tensors, such as) {}.*missing ones would be random; download or save"
)
CLASSIFIER = "expected a language model, got a model for sequence classification .* with score.weight"
SEVERAL = "expected a reward model with score.weight, got one whose head is 4 tensors, such as score.0.bias,.*; "
# What is changed in which model's folder; how it is loaded; what is said.
REFUSED = [
    *((renamed(f"{each}{{}}".format), {"family": family}, how, WRAPPED.format(re.escape(each)))
      for each, family, how in (
          ("module.", "llama", {}), ("module.", "llama", SCALAR), ("_orig_mod.", "gpt2", {}),
          ("base_model.model.", "opt", SCALAR), ("module._orig_mod.", "llama", {}), ("pretrained_model.", "opt", {}))),
    *((replaced("self_attn.", f"{each}self_attn."), {}, {}, f"the names of 8 tensors contain a wrapper's '{each}'")
      for each in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")),
    *((without(name), {"family": family}, how, RANDOM.format(re.escape(name)))
      for family, name, how in (
          ("llama", "model.layers.1.mlp.up_proj.weight", {}), ("llama", "model.norm.weight", SCALAR),
          ("qwen3", "model.layers.0.self_attn.q_norm.weight", {}), ("gpt2", "transformer.wpe.weight", SCALAR),
          ("opt", "model.decoder.layers.0.fc1.bias", {}))),
    (without("transformer.wte.weight"), {"family": "gpt2"}, {}, "lacks 2 tensors, such as "),  # tied
    (without("lm_head.weight"), {}, {}, "lacks the tensor lm_head.weight, of the 21 in"),
    # A classifier is no language model: GPT-2's head is tied, so none would be missing.
    (same, SCALAR, {}, CLASSIFIER + ".* without lm_head.weight, which would be random"),
    (same, {"family": "gpt2", "scalar": True, "num_labels": 2}, {}, CLASSIFIER + "(?!.*without)"),
    (without("score.weight"), SCALAR, JUDGE,
     "expected a reward model, got one without score.weight: its scores would be random"),
    (without("score.weight"), {"family": "opt", "scalar": True}, SCALAR,
     r"expected a reward model with score.weight, got \w+ForSequenceClassification without"),
    (several, SCALAR, SCALAR, SEVERAL + "train a new head in its place with --new_head"),
    (several, SCALAR, JUDGE, SEVERAL + "train one with step 2"),
    *((more(score__bias=(1,)), SCALAR, how,
       r"has score.bias next to score.weight, .* would shift by a constant.*t\.LlamaForSequenceClassification\.from_p")
      for how in (SCALAR, JUDGE)),
    (more(lm_head__bias=(8,)), {}, {},
     "has lm_head.bias next to lm_head.weight, .* log-probabilities would change; .* save the model "
     r"without it: python -c .*t\.LlamaForCausalLM\.from_pretrained"),
    (same, SCALAR, NEW, "--new_head is for a model whose head is not named .* has such a head;"),
    (same, {"scalar": True, "num_labels": 2}, SCALAR,
     "expected a model with one label, got 2 labels .num_labels 2, score.weight"),
    (same, {"scalar": True, "num_labels": 3}, JUDGE, "expected a reward model with one label, got 3 labels"),
    (cut, {}, {},
     rf"model.safetensors': {UP} expects the shape \[48, 32\] from config.json, got \[47, 32\] \(2 tensors differ\)"),
    (adapters, {}, {}, "holds LoRA adapters next to the weights .the tensor .*lora_A.* merge them"),
    # Untied at stage 0 and tied at stage 3, if they differ; a warning that nobody saw was all.
    (other_head, {"tie_word_embeddings": True}, {},
     "config.json ties lm_head.weight to model.embed_tokens.weight, but the files hold both, with diff"),
    # transformers would take integers for numbers.
    *((stored_as(dtype), {}, {}, f"{UP} is stored in [IF0-9_EMN]+, as quantized weights are, but config.json has no")
      for dtype in (torch.int8, torch.float8_e4m3fn)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "model", "how", "words"), REFUSED, ids=[case[-1][:60] for case in REFUSED])
def test_weights_that_are_not_the_models(changed_folder, change, model, how, words):
    sentence = refused(changed_folder(change, **model), words, **how)
    assert "--new_head" not in sentence or not how.get("must_have_head")


NEW_HEAD = "model: '{}' has no scalar head; initialized at random: score.weight\n"
# As before, and all that is said.
LOADED = [
    *((same, {"family": family, **how}, {**how, "must_have_head": bool(how)}, "")
      for family in [*FAMILIES, *PADDED_FAMILIES] for how in ({}, SCALAR)
      if (family, how) != ("mamba", SCALAR)),  # of which transformers has no scalar head
    (same, {"tie_word_embeddings": True}, {}, ""),
    (without("score.weight"), {"family": "gpt2", "scalar": True}, NEW, NEW_HEAD),
    (same, {"family": "gpt2"}, SCALAR, NEW_HEAD),
    (same, {}, NEW, NEW_HEAD),  # as without it
    (several, SCALAR, NEW, None),
    (more(lm_head__bias=(8,)), {}, SCALAR, None),  # a scalar model has no output layer to miss it
    (more(v_head__summary__weight=(1, 32)), {}, {},
     "model: '{}' has another head, which is not used here: the tensor v_head.summary.weight\n"),
    # What transformers itself ignores.
    (more(transformer__h__0__attn__bias=(1, 1, 4, 4)), {"family": "gpt2"}, {}, ""),
    (more(model__layers__0__self_attn__rotary_emb__inv_freq=(8,)), {}, {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("change", "model", "how", "line"), LOADED)
def test_what_loads_and_what_is_said(changed_folder, change, model, how, line, capfd):
    folder = changed_folder(change, **model)
    loaded = load(folder, **how)
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    if model.get("tie_word_embeddings"):
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    said = capfd.readouterr()
    assert line is None or said.out == line.format(folder)
    assert folder not in said.err and "score.weight" not in said.err  # no table of transformers beside it


@pytest.mark.parametrize("how", [{}, SCALAR])
def test_tensors_that_nobody_knows_pass_with_a_warning(changed_folder, how, capsys):
    """As those of further layers that predict the token after the next."""
    unknown = {f"model.layers.2.mtp.{part}.weight": torch.zeros(3) for part in "abcd"}
    load(changed_folder(lambda tensors: {**tensors, **unknown}), **how)
    (warned,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "neither used nor saved" in warned and "4 tensors, such as model.layers.2.mtp.a.weight" in warned


@pytest.mark.parametrize(
    "rename",
    [
        "base_model.model.{}".format,
        "module._orig_mod.{}".format,
        lambda name: name.replace("mlp.", "_orig_mod.mlp."),
    ],
)
def test_the_command_renames(changed_folder, save_folder, tmp_path, rename):
    command_of(refused(changed_folder(renamed(rename), name="odd"), "rename them"), tmp_path / "out")
    want = load_file(Path(save_folder("plain")) / "model.safetensors")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == want.keys() and all(torch.equal(made[name], want[name]) for name in made)
    load(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "name", ["v_head.weight", "value_head.weight", "rm.regression_head.weight", "preference.weight"]
)
def test_a_head_under_another_name_is_renamed_or_replaced(changed_folder, tmp_path, name, capsys):
    """As DeepSpeed-Chat, OpenRLHF and UltraRM name it, and by its shape. The command that is named makes a reward model
    of the same scores."""
    scores = load(changed_folder(same, name="plain", scalar=True), **JUDGE)
    folder = changed_folder(replaced("score.weight", name), name="renamed", scalar=True)
    words = f"score.weight, got one whose head is the tensor {name}; rename"
    assert "--new_head" not in refused(folder, words, **JUDGE)
    sentence = refused(folder, words, **SCALAR)
    assert "or train a new head in its place with --new_head" in sentence
    if name == "v_head.weight":
        command_of(sentence, tmp_path / "out")
        assert torch.equal(load(str(tmp_path / "out"), **JUDGE).score.weight, scores.score.weight)
    capsys.readouterr()
    load(folder, **NEW)
    said = (
        f"model: '{folder}' has a different head (the tensor {name}), which is not used; initialized at random: score"
    )
    assert said in capsys.readouterr().out


def test_a_wrong_shape_names_its_file(save_folder):
    folder = Path(save_folder())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + ('layers.1' in name)}.safetensors" for name in tensors}
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 40)
    for file in set(names.values()):
        part = {name: tensors[name].clone() for name in names if names[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(str(folder), r"model-00002.safetensors': model.layers.1.mlp.down_proj.weight expects the shape \[32, 48\]")


def test_a_configuration_of_another_size_or_architecture(save_folder):
    folder, other = save_folder(), save_folder("gpt2", family="gpt2")
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    for text, words in (
        (json.dumps({**config, "num_hidden_layers": 3}), "lacks 9 tensors, such as model.layers.2.input_layernorm"),
        (json.dumps({**config, "hidden_size": 64}), "expects the shape .* from config.json, got"),
        ((Path(other) / "config.json").read_text(), "lacks 27 tensors, .* know 20 tensors, .* different architectures"),
    ):
        file.write_text(text)
        refused(folder, words)


def test_a_trunk_without_the_models_prefix_is_the_same_trunk(changed_folder, save_folder):
    """As a base model is saved: not wrapped, and not missing."""
    bare = changed_folder(
        lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"},
        name="bare",
    )
    loaded, want = load(bare, scalar=True), load(save_folder("whole"), scalar=True)
    for name, tensor in want.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    refused(bare, "lacks the tensor lm_head.weight")


def test_an_expert_that_is_missing(tmp_path, tiny_tokenizer, caplog):
    """Experts are merged into one tensor; what cannot be merged is named, also where transformers is silenced."""
    caplog.set_level(logging.ERROR, logger="transformers")
    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=len(tiny_tokenizer), num_local_experts=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    load(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    for part, words in {
        "w1": "the tensor model.layers.0.mlp.experts.gate_up_proj of .* from the tensors in the files",
        "w2": r"model.layers.0.mlp.experts.down_proj expects the shape \[4, 32, 48\] from config.json, got \[3, 32",
    }.items():
        name = f"model.layers.0.block_sparse_moe.experts.1.{part}.weight"
        save_file({key: t.clone() for key, t in tensors.items() if key != name}, tmp_path / "model.safetensors")
        refused(str(tmp_path), words)


def test_what_went_missing_in_earnest_is_refused(save_folder, monkeypatch):
    """Were the load ever to differ from its rehearsal."""
    folder, own = save_folder(), AutoModelForCausalLM.from_pretrained

    def lossy(*arguments, **options):
        model, report = own(*arguments, **options)
        return model, {**report, "missing_keys": {"model.norm.weight"}}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lossy)
    refused(folder, "lacks the tensor model.norm.weight")


@pytest.fixture
def in_hub(tmp_path, monkeypatch):
    """Put a folder into a hub's cache; the name is an/owner."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(folder: str) -> str:
        snapshot = tmp_path / "hub" / "models--an--owner" / "snapshots" / ("0" * 40)
        snapshot.parent.mkdir(parents=True)
        Path(folder).rename(snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
        return "an/owner"

    return put


def test_a_hub_name_is_judged_as_a_folder_is(changed_folder, in_hub):
    name = in_hub(changed_folder(without("model.norm.weight")))
    refused(name, "'an/owner' holds 20 tensors but lacks the tensor model.norm.weight")


def test_a_whole_hub_name_loads(save_folder, in_hub, capsys):
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level, list(logger.filters)
    load(in_hub(save_folder()))
    assert "an/owner" not in capsys.readouterr().out
    assert (logger.level, list(logger.filters)) == before


def test_a_hub_name_with_pickles_alone(save_folder, in_hub):
    folder = Path(save_folder())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    words = "has no safetensors files on the hub; pickled weights are refused, .*convert them: python"
    refused(in_hub(str(folder)), words)


@pytest.mark.needs_plugin("lora")
def test_a_hub_name_of_an_adapter(save_folder, in_hub):
    folder = Path(save_folder())
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    name = in_hub(str(folder))
    with pytest.raises(ThreestepError, match="no base of the adapter 'an/owner' .* could be loaded from 'a/base'"):
        load_config(name)


def test_a_model_that_cannot_be_rehearsed_is_judged_once_it_is_loaded(changed_folder, save_folder, monkeypatch):
    """Qwen4's constructor reads its own values. Before, its folder was said to be broken."""

    def no_values(*_: object) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr(rehearsal, "_rehearsed", no_values)
    load(save_folder("llama"))
    refused(changed_folder(without("model.norm.weight")), "model.norm.weight")


def test_a_family_that_cannot_be_loaded_in_shards(save_folder, monkeypatch):
    """One reads a shape while it is set up; of another transformers leaves a tensor out."""
    folder = save_folder("llama")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.is_deepspeed_zero3_enabled", lambda: True)
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: ()[0])
        refused(
            folder,
            r"cannot be loaded in shards, which --zero_stage 3 requires \(IndexError: tuple index out of range\)",
        )
        family: dict = {}  # Marian and RoFormer unpack a shape; transformers' own ValueErrors are kept
        code = "def load(*_, **__):\n    rows, columns = (0,)"
        for file, words in (
            (
                "models/marian/modeling_marian.py",
                r"cannot be loaded in shards, .* \(ValueError: not enough values to un",
            ),
            ("transformers/modeling_utils.py", "no model could be loaded from .*: not enough values to unpack"),
        ):
            exec(compile(code, file, "exec"), family)
            patch.setattr(AutoModelForCausalLM, "from_pretrained", family["load"])
            refused(folder, words)
    config = load_config(folder)
    model = AutoModelForCausalLM.from_config(config)
    model.model.norm.weight.ds_id = 1
    report = {"missing_keys": ["model.norm.weight"], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    wanted = RequestedModel(folder, config, is_scalar=False)
    with pytest.raises(
        ThreestepError, match=r"initializes 1 of its tensors at random \(model.norm.weight\), although the files"
    ):
        rehearsal.judge_loaded(wanted, model, report, rehearsal.stored_tensors(folder, config), rehearsed=True)
