"""The head that vLLM drafts with: what it is told, the weights and the figures. vllm/test_draft.py runs it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.mtp.head import new_head
from threestep.plugins.vllm.draft import VllmDraft, expand_batch_to_tokens


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
