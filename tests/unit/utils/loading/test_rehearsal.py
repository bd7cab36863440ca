"""Weights that are not those of the model are refused by name, before any is read; what is new or unused is said."""

from __future__ import annotations

import json
import logging
import re
import shlex
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

WRAPPERS = ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "pretrained_model."]


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


def without(*names: str):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("family", [*FAMILIES, *PADDED_FAMILIES])
@pytest.mark.parametrize("scalar", [False, True])
def test_whole_models_load_without_a_word(save_folder, family, scalar, capsys):
    if (family, scalar) == ("mamba", True):
        pytest.skip("transformers has no scalar head for Mamba")
    folder = save_folder(family=family, scalar=scalar)
    model = load(folder, scalar, must_have_head=scalar)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    said = capsys.readouterr()
    assert folder not in said.out and folder not in said.err


@pytest.mark.parametrize(
    ("family", "wrapper"),
    [*(("llama", wrapper) for wrapper in WRAPPERS), *((family, "module.") for family in FAMILIES)],
)
@pytest.mark.parametrize("scalar", [False, True])
def test_names_of_a_wrapper(changed_folder, family, wrapper, scalar):
    folder = changed_folder(lambda tensors: {wrapper + name: tensor for name, tensor in tensors.items()}, family=family)
    sentence = refused(
        folder, rf"\d+ tensors have the '{re.escape(wrapper)}' of a wrapper in their names, such as ", scalar=scalar
    )
    example, name = re.findall(r"such as (\S+), where .* has (\S+);", sentence)[0]
    assert example == wrapper + name and "rename them: python -c" in sentence


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_a_wrapper_around_blocks(changed_folder, wrapper):
    folder = changed_folder(
        lambda tensors: {name.replace("self_attn.", f"{wrapper}self_attn."): t for name, t in tensors.items()}
    )
    refused(folder, f"8 tensors have the '{wrapper}' of a wrapper .* model.layers.0.{wrapper}self_attn.k_proj.weight")


@pytest.mark.parametrize("form", ["before", "inside", "nested"])
def test_the_command_renames(changed_folder, save_folder, tmp_path, form):
    forms = {
        "before": lambda name: f"base_model.model.{name}",
        "inside": lambda name: name.replace("mlp.", "_orig_mod.mlp."),
        "nested": lambda name: f"module._orig_mod.{name}",
    }
    folder = changed_folder(lambda tensors: {forms[form](name): tensor for name, tensor in tensors.items()}, name="odd")
    sentence = refused(folder, "rename them")
    code = shlex.split(sentence[sentence.index("python -c ") :])[2].replace("'OUT'", f"'{tmp_path / 'out'}'")
    ran = run_python(["-c", code])
    assert ran.returncode == 0, ran.stderr
    want = load_file(Path(save_folder("plain")) / "model.safetensors")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == want.keys() and all(torch.equal(made[name], want[name]) for name in made)
    load(str(tmp_path / "out"))


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("gpt2", "transformer.wpe.weight"),
        ("gpt2", "transformer.wte.weight"),  # tied: with it the head is gone
        ("opt", "model.decoder.layers.0.fc1.bias"),
    ],
)
def test_one_tensor_that_is_missing(changed_folder, family, name, scalar):
    sentence = refused(
        changed_folder(without(name), family=family), "they would be random; download or save", scalar=scalar
    )
    assert name in sentence and re.search(r"holds \d+ tensors and lacks (the tensor|2 tensors, such as)", sentence)
    assert "score" not in sentence


def test_a_missing_head_is_missing_unless_it_is_tied(changed_folder):
    refused(changed_folder(without("lm_head.weight"), name="untied"), "lacks the tensor lm_head.weight, of the 21 of")
    load(changed_folder(lambda tensors: tensors, name="tied", tie_word_embeddings=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("labels", [1, 2])
def test_a_classifier_is_no_language_model(save_folder, family, labels):
    """GPT-2's head is tied, so none would be missing: it would train a reward model's trunk."""
    folder = save_folder(family=family, scalar=True, num_labels=labels)
    sentence = refused(
        folder, "expected a language model, got a model for sequence classification .* with score.weight"
    )
    assert ("without lm_head.weight, which would be random" in sentence) == (family in ("llama", "qwen3"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_reward_model_without_its_head_does_not_judge(changed_folder, family, capsys):
    folder = changed_folder(without("score.weight"), family=family, scalar=True)
    refused(
        folder,
        "expected a reward model, got one without score.weight: its scores would be random",
        scalar=True,
        must_have_head=True,
    )
    refused(folder, r"expected a reward model with score.weight, got \w+ForSequenceClassification without", scalar=True)
    load(folder, scalar=True, new_head=True)
    assert capsys.readouterr().out == f"model: '{folder}' has no scalar head: score.weight is new, drawn at random\n"


@pytest.mark.parametrize(
    "name", ["v_head.weight", "value_head.weight", "rm.regression_head.weight", "preference.weight"]
)
def test_a_head_under_another_name_is_renamed_or_replaced(changed_folder, tmp_path, name, capsys):
    """As DeepSpeed-Chat, OpenRLHF and UltraRM name it, and by its shape. The command that is named makes a reward model
    of the same scores."""

    def renamed(tensors):
        return {name if key == "score.weight" else key: tensor for key, tensor in tensors.items()}

    scores = load(changed_folder(lambda tensors: tensors, name="plain", scalar=True), True, must_have_head=True)
    folder = changed_folder(renamed, name="renamed", scalar=True)
    words = f"score.weight, got one whose head is the tensor {name}; rename"
    assert "--new_head" not in refused(folder, words, scalar=True, must_have_head=True)
    sentence = refused(folder, words, scalar=True)
    assert "or train a new head in its place with --new_head" in sentence
    if name == "v_head.weight":
        command = re.search(r"python -c \"(.+)\"", sentence)[1].replace("'OUT'", f"'{tmp_path / 'out'}'")
        run_python(["-c", command])
        assert torch.equal(load(str(tmp_path / "out"), True, must_have_head=True).score.weight, scores.score.weight)
    capsys.readouterr()
    load(folder, scalar=True, new_head=True)
    said = f"model: '{folder}' has another head (the tensor {name}), which is left out: score.weight is new, drawn at"
    assert said in capsys.readouterr().out


def test_a_head_of_several_tensors_is_replaced_when_that_is_asked_for(changed_folder):
    """As Qwen2.5-Math-RM's: no one row of weights scores as it does."""
    more = {"score.0.weight": (32, 32), "score.0.bias": (32,), "score.2.weight": (1, 32), "score.2.bias": (1,)}

    def with_more(tensors):
        kept = {name: tensor for name, tensor in tensors.items() if name != "score.weight"}
        return kept | {name: torch.zeros(shape) for name, shape in more.items()}

    folder = changed_folder(with_more, scalar=True)
    found = "expected a reward model with score.weight, got one whose head is 4 tensors, such as score.0.bias,"
    assert "rename" not in refused(folder, found + ".*; train a new head in its place with --new_head", scalar=True)
    refused(folder, found + ".*; train one with step 2", scalar=True, must_have_head=True)
    load(folder, scalar=True, new_head=True)


@pytest.mark.parametrize("must_have_head", [True, False])
def test_a_bias_of_the_score_is_not_dropped(changed_folder, must_have_head):
    folder = changed_folder(lambda tensors: {**tensors, "score.bias": torch.ones(1)}, scalar=True)
    sentence = refused(
        folder,
        "holds score.bias beside score.weight, .* would move by that",
        scalar=True,
        must_have_head=must_have_head,
    )
    assert "t.LlamaForSequenceClassification.from_pretrained(" in sentence


def test_a_bias_of_the_output_layer_is_not_dropped(changed_folder):
    """Without it every log-probability would be another. A scalar model has no output layer to miss it."""
    folder = changed_folder(lambda tensors: {**tensors, "lm_head.bias": torch.ones(8)})
    refused(
        folder,
        "holds lm_head.bias beside lm_head.weight, .* all its log-probabilities would be others; if they may, save it "
        r"without: python -c .*t\.LlamaForCausalLM\.from_pretrained",
    )
    load(folder, scalar=True)


def test_a_new_head_where_there_is_one_is_refused(save_folder):
    with pytest.raises(ThreestepError, match="--new_head is for a model whose head has another name .* has that;"):
        load(save_folder(scalar=True), scalar=True, new_head=True)
    load(save_folder("language"), scalar=True, new_head=True)  # as without it


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_new_head_is_one_line(save_folder, family, capfd):
    folder = save_folder(family=family)
    load(folder, scalar=True)
    said = capfd.readouterr()
    assert said.out == f"model: '{folder}' has no scalar head: score.weight is new, drawn at random\n"
    assert "score.weight" not in said.err  # no table of transformers beside it


@pytest.mark.parametrize("labels", [2, 5])
def test_a_classifier_of_several_labels_in_step_2(save_folder, labels):
    folder = save_folder(scalar=True, num_labels=labels)
    refused(
        folder, rf"expected a model with one label, got {labels} labels .num_labels {labels}, score.weight", scalar=True
    )


def test_a_wrong_shape(changed_folder):
    def cut(tensors):
        return {name: tensor[:-1].clone() if "up_proj" in name else tensor for name, tensor in tensors.items()}

    folder = changed_folder(cut)
    for scalar in (False, True):
        refused(
            folder,
            r"model.safetensors': model.layers.0.mlp.up_proj.weight expects the shape \[48, 32\] of config.json, got "
            r"\[47, 32\], and so on for 2 tensors; give the weights and the configuration of one model",
            scalar=scalar,
        )


def test_a_wrong_shape_names_its_file(save_folder):
    folder = Path(save_folder())
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + ('layers.1' in name)}.safetensors" for name in tensors}
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 40)
    for file in set(names.values()):
        save_file(
            {name: tensors[name].clone() for name in names if names[name] == file}, folder / file, {"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(str(folder), r"model-00002.safetensors': model.layers.1.mlp.down_proj.weight expects the shape \[32, 48\]")


def test_a_configuration_of_another_size(save_folder):
    folder = save_folder()
    config = json.loads((Path(folder) / "config.json").read_text())
    (Path(folder) / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(folder, "lacks 9 tensors, such as model.layers.2.input_layernorm.weight")
    (Path(folder) / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    refused(folder, "expects the shape .* of config.json, got")


def test_a_configuration_of_another_architecture(save_folder):
    folder, other = save_folder(), save_folder("gpt2", family="gpt2")
    (Path(folder) / "config.json").write_text((Path(other) / "config.json").read_text())
    refused(folder, "lacks 27 tensors, .* which does not know 20 tensors, .* are of different architectures")


def test_adapters_that_were_not_merged(changed_folder):
    def with_adapters(tensors):
        renamed = {name.replace("q_proj.", "q_proj.base_layer."): tensor for name, tensor in tensors.items()}
        return {**renamed, "model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 32)}

    refused(changed_folder(with_adapters), "holds LoRA adapters beside the weights .the tensor .*lora_A.* merge them")


def test_heads_that_are_not_used_pass_with_a_line(changed_folder, capsys):
    folder = changed_folder(lambda tensors: {**tensors, "v_head.summary.weight": torch.zeros(1, 32)})
    load(folder)
    assert (
        capsys.readouterr().out
        == f"model: '{folder}': not used here, of another head: the tensor v_head.summary.weight\n"
    )


@pytest.mark.parametrize("scalar", [False, True])
def test_tensors_that_nobody_knows_pass_with_a_warning(changed_folder, scalar, capsys):
    """As those of further layers that predict the token after the next."""
    more = {f"model.layers.2.mtp.{part}.weight": torch.zeros(3) for part in "abcd"}
    load(changed_folder(lambda tensors: {**tensors, **more}), scalar)
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert (
        "not used, and not saved again" in warned[0] and "4 tensors, such as model.layers.2.mtp.a.weight" in warned[0]
    )


def test_what_transformers_itself_ignores_passes_in_silence(changed_folder, capsys):
    old = {"transformer.h.0.attn.bias": torch.zeros(1, 1, 4, 4)}
    load(changed_folder(lambda tensors: {**tensors, **old}, family="gpt2"))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load(changed_folder(lambda tensors: {**tensors, **frequencies}, name="llama"))
    assert capsys.readouterr().out == ""


def test_a_trunk_without_the_models_prefix_is_the_same_trunk(changed_folder, save_folder, capsys):
    """As a base model is saved: not wrapped, and not missing."""
    bare = changed_folder(
        lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"},
        name="bare",
    )
    loaded, want = load(bare, scalar=True), load(save_folder("whole"), scalar=True)
    for name, tensor in want.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    refused(bare, "lacks the tensor lm_head.weight")


@pytest.mark.parametrize("same", [True, False])
def test_tied_tensors_that_are_both_there(changed_folder, same):
    """Untied at stage 0 and tied at stage 3, if they differ; a warning that nobody saw was all."""

    def with_head(tensors):
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + (0.0 if same else 1.0)}

    folder = changed_folder(with_head, tie_word_embeddings=True)
    if same:
        model = load(folder)
        assert model.lm_head.weight is model.get_input_embeddings().weight
    else:
        refused(
            folder, "config.json ties lm_head.weight to model.embed_tokens.weight and the files hold both, with diff"
        )


@pytest.mark.parametrize("part", ["w1", "w2"])
def test_an_expert_that_is_missing(changed_folder, tmp_path, tiny_tokenizer, part, caplog):
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
    name = f"model.layers.0.block_sparse_moe.experts.1.{part}.weight"
    save_file({key: t.clone() for key, t in tensors.items() if key != name}, tmp_path / "model.safetensors")
    words = {
        "w1": "the tensor model.layers.0.mlp.experts.gate_up_proj of .* cannot be made of the tensors in the files",
        "w2": r"model.layers.0.mlp.experts.down_proj expects the shape \[4, 32, 48\] of config.json, got \[3, 32, 48\]",
    }
    refused(str(tmp_path), words[part])


def test_what_went_missing_in_earnest_is_refused(save_folder, monkeypatch):
    """Were the load ever to differ from its rehearsal."""
    folder = save_folder()
    own = AutoModelForCausalLM.from_pretrained

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
    refused(name, "'an/owner' holds 20 tensors and lacks the tensor model.norm.weight")


def test_a_whole_hub_name_loads(save_folder, in_hub, capsys):
    load(in_hub(save_folder()))
    assert "an/owner" not in capsys.readouterr().out


def test_a_hub_name_with_pickles_alone(save_folder, in_hub):
    folder = Path(save_folder())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(
        in_hub(str(folder)), "has no safetensors on the hub; pickled weights, .* are refused; .*convert them: python"
    )


@pytest.mark.needs_plugin("lora")
def test_a_hub_name_of_an_adapter(save_folder, in_hub):
    folder = Path(save_folder())
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    name = in_hub(str(folder))
    with pytest.raises(ThreestepError, match="no base of the adapter 'an/owner' .* could be loaded from 'a/base'"):
        load_config(name)


def test_the_log_of_transformers_is_as_it_was(save_folder):
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level, list(logger.filters)
    load(save_folder())
    assert (logger.level, list(logger.filters)) == before


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
        refused(folder, r"cannot be loaded in shards, as --zero_stage 3 does \(IndexError: tuple index out of range\)")
        family: dict = {}  # Marian and RoFormer unpack a shape; transformers' own ValueErrors are kept
        code = "def load(*_, **__):\n    rows, columns = (0,)"
        exec(compile(code, "models/marian/modeling_marian.py", "exec"), family)
        patch.setattr(AutoModelForCausalLM, "from_pretrained", family["load"])
        refused(folder, r"cannot be loaded in shards, as --zero_stage 3 does \(ValueError: not enough values to unpack")
        exec(compile(code, "transformers/modeling_utils.py", "exec"), family)
        patch.setattr(AutoModelForCausalLM, "from_pretrained", family["load"])
        refused(folder, "no model could be loaded from .*: not enough values to unpack")
    config = load_config(folder)
    model = AutoModelForCausalLM.from_config(config)
    model.model.norm.weight.ds_id = 1
    report = {"missing_keys": ["model.norm.weight"], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    wanted = RequestedModel(folder, config, is_scalar=False)
    with pytest.raises(ThreestepError, match=r"leaves 1 of its tensors random \(model.norm.weight\), though the files"):
        rehearsal.judge_loaded(wanted, model, report, rehearsal.stored_tensors(folder, config), rehearsed=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_a_weight_that_is_stored_as_quantized_ones_are(changed_folder, dtype):
    """transformers would take its integers for numbers."""
    name = "model.layers.0.mlp.up_proj.weight"
    folder = changed_folder(lambda tensors: tensors | {name: tensors[name].to(dtype)})
    refused(
        folder, f"{name} is stored in [IF0-9_EMN]+, as quantized weights are, and config.json has no quantization_co"
    )
