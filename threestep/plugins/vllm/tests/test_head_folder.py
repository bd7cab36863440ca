"""The head that vLLM drafts with: what it is told, weights and figures, and its folder. vllm/test_mtp.py runs it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.mtp.folder import read_head, save_head
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.public_names import FORMS, from_public
from threestep.plugins.mtp.tests.test_public_names import drawn_head
from threestep.plugins.programs import export
from threestep.plugins.vllm.draft import VllmDraft, expand_batch_to_tokens
from threestep.plugins.vllm.head_folder import write_for_vllm
from training.utils.base.errors import ThreestepError

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}


def model_of(family):
    if family == "llama":
        return tiny_causal_lm("llama")
    from transformers import AutoConfig

    shape = {**SHAPE, "num_key_value_heads": 1, "vocab_size": VOCABULARY, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()


def saved(folder, family, form, depths=1, **shards):
    """A model folder with a head, in files of at most a size."""
    model = model_of(family)
    model.save_pretrained(folder, **shards)
    head = drawn_head(model, form, depths)
    save_head(folder, depths, dict(head.state_dict()))
    return model, head


def told_by(folder):
    """Make vLLM's folder of it; return what vLLM is told."""
    return json.loads(write_for_vllm(folder).split("'")[1])


def loaded(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize(("family", "depths"), [("qwen2", 1), ("llama", 2)])
def test_as_mimo_the_folder_is_a_qwen2_with_the_same_logits(family, depths, tmp_path):
    model, head = saved(tmp_path, family, "mimo", depths, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert told_by(tmp_path) == {"method": "mtp", "num_speculative_tokens": 1}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    again = loaded(tmp_path)
    assert type(again).__name__ == "Qwen2ForCausalLM"
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    read_head(tmp_path, new_head(again, depths, seed=4))  # and trains on
    stored = load_file(tmp_path / "mtp.safetensors")
    assert all(name.startswith("model.mtp_layers.0.") for name in stored)
    state, got = head.state_dict(), from_public(FORMS["mimo"], stored, 2, 1)
    norm_H = model.model.norm.weight.detach()
    assert torch.equal(got["depths.0.eh_proj.weight"], state["depths.0.eh_proj.weight"])
    expected_H = state["depths.0.hnorm.weight"] * norm_H / norm_H.square().mean().sqrt()
    torch.testing.assert_close(got["depths.0.hnorm.weight"], expected_H)
    assert got["depths.0.trunk.layers.0.self_attn.q_proj.bias"].shape == (32,)


def test_beside_a_llama_ernies_head_has_a_folder_of_its_own(tmp_path):
    model, head = saved(tmp_path, "llama", "ernie")
    told = told_by(tmp_path)
    assert told == {"model": str(tmp_path / "draft"), "method": "mtp", "num_speculative_tokens": 1}
    again = loaded(tmp_path)
    assert type(again) is type(model) and again.config.num_nextn_predict_layers == 1
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["ErnieMTPModel"], "ernie4_5_moe")
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert torch.equal(stored.pop("model.embed_tokens.weight"), model.model.embed_tokens.weight)
    assert torch.equal(stored.pop("lm_head.weight"), model.lm_head.weight)
    back = from_public(FORMS["ernie"], stored, 2, 1)
    assert back.keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in back.items())


@pytest.mark.parametrize(
    ("family", "form", "got"),
    [("qwen3", "mimo", "qwen3 with a head that ends"), ("qwen2", "ernie", "qwen2 with a head without")],
)
def test_a_family_without_a_form_is_refused(family, form, got, tmp_path):
    saved(tmp_path, family, form)
    with pytest.raises(
        ThreestepError, match=rf"needs a Qwen2, .*\(exported as MiMo\), .*\(exported as ERNIE-4.5\), got {got}"
    ):
        write_for_vllm(tmp_path)


def test_folders_and_runs_without_a_head_are_refused(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    with pytest.raises(
        ThreestepError,
        match="--mtp vllm needs a model with a multi-token-prediction head.* train one with --mtp_num_layers 1",
    ):
        write_for_vllm(tmp_path)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text("{}")
    (run / "summary.json").write_text("{}")
    with pytest.raises(ThreestepError, match="--mtp vllm needs a model with a multi-token-prediction head, but"):
        export.main([str(run), str(tmp_path / "out"), "--mtp", "vllm"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [["--part", "critic"], ["--keep_lora"]])
def test_a_head_goes_with_the_merged_model(tmp_path, other):
    with pytest.raises(ThreestepError, match="--mtp needs the merged model; remove --keep_lora and --part"):
        export.main([str(tmp_path), str(tmp_path / "out"), "--mtp", "vllm", *other])


def draft_of(final_norm: bool, tokens: int = 2):
    model = tiny_causal_lm("llama")
    head = new_head(model, 2, 0, final_norm)
    return model, head, VllmDraft(tokens, lambda: nullcontext(head))


@pytest.mark.parametrize(
    ("final_norm", "architecture", "family"),
    [(True, "MiMoForCausalLM", "qwen2"), (False, "ErnieMTPModel", "ernie4_5_moe")],
)
def test_the_model_keeps_its_family_and_the_draft_has_a_folder(final_norm, architecture, family, tmp_path):
    model, _, draft = draft_of(final_norm)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    told = draft.described(tmp_path)
    assert told == {"model": str(tmp_path / "draft"), "method": "mtp", "num_speculative_tokens": 2}
    own, beside = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "draft"))
    assert (own["architectures"], own["model_type"], own["num_nextn_predict_layers"]) == (
        ["LlamaForCausalLM"], "llama", 1,
    )  # fmt: skip
    assert (beside["architectures"], beside["model_type"]) == ([architecture], family)


def test_the_weights_are_the_first_modules_as_vllm_loads_them():
    model, head, draft = draft_of(final_norm=True)
    found = draft.tensors(model.config, torch.bfloat16)
    state = head.state_dict()
    assert all(
        name.startswith("model.mtp_layers.0.") and tensor.dtype == torch.bfloat16 for name, tensor in found.items()
    )
    # Nothing of the model's final norm is folded in: beside a Llama, MiMo's head reads the state after it.
    assert torch.equal(found["model.mtp_layers.0.hidden_layernorm.weight"], state["depths.0.hnorm.weight"].bfloat16())
    assert not found["model.mtp_layers.0.self_attn.q_proj.bias"].any()
    without_biases = [name for name in found if not name.endswith("bias")]
    assert len(without_biases) == sum(name.startswith("depths.0.") for name in state)
    ernie = draft_of(final_norm=False)[2].tensors(model.config, torch.float32)
    assert not any("bias" in name or "final" in name for name in ernie)


def test_what_was_accepted_since_the_last_time():
    draft = draft_of(final_norm=True)[2]
    names = ("drafts", "draft_tokens", "accepted_tokens")

    def counters(*values):
        return {f"vllm:spec_decode_num_{name}": float(value) for name, value in zip(names, values, strict=True)}

    assert draft.figures({}) == {}
    draft.figures(counters(10, 20, 12))
    assert draft.figures(counters(14, 28, 14)) == {
        "rollout/guesses_accepted": 0.25,
        "rollout/tokens_per_forward": 1.5,
    }
    assert draft.figures(counters(14, 28, 14)) == {}


def test_every_draft_has_its_requests_temperature():
    """Three requests with 2, 0 and 3 drafts; 0 is greedy, which divides by 1."""
    ends, values = torch.tensor([2, 2, 5], dtype=torch.int32), torch.tensor([0.7, 0.3, 0.0])
    got = expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
    assert torch.equal(got, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))
    most = expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    assert most.tolist() == [3, 3, 5, 5, 5] and most.dtype == torch.int32
