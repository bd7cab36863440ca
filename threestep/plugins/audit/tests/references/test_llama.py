"""The Llama beside transformers', whose norms and angles stay in float32: logits, scores, gradients; refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from threestep.plugins.audit.references.llama import Llama, Slopes, why_unknown

pytestmark = pytest.mark.unit

SHAPE = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.5,
}  # fmt: skip
SEQUENCES = [np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6])]


def model_of(kind: str, **changes: object) -> torch.nn.Module:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{'Qwen2' if kind == 'qwen2' else 'Llama'}Config")(**{**SHAPE, **changes})
    name = {"qwen2": "Qwen2ForCausalLM", "score": "LlamaForSequenceClassification"}.get(kind, "LlamaForCausalLM")
    model = getattr(transformers, name)(config).double()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def reference_of(model: torch.nn.Module, **more: object) -> Llama:
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return Llama(weights, json.loads(model.config.to_json_string()) | more)


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {})])
def test_logits_and_gradients_are_transformers(kind, changes):
    model = model_of(kind, **changes)
    read, terms = [], torch.zeros((), dtype=torch.float64)
    slopes = Slopes(*np.random.default_rng(1).normal(size=(3, 8)), temperature=0.7)
    begin = 0
    for ids in SEQUENCES:
        logits = torch.nn.functional.pad(model(torch.tensor(ids)[None]).logits[0, :-1], (0, 0, 1, 0))
        read.append(logits.detach().numpy())
        scaled = logits / 0.7
        own = slice(begin, begin + len(ids))
        begin += len(ids)
        log_p = scaled.log_softmax(-1)
        parts = {
            "logprobs_T": log_p.gather(1, torch.tensor(ids)[:, None])[:, 0],
            "normalizers_T": scaled.logsumexp(-1),
            "entropies_T": -(log_p.exp() * log_p).sum(-1),
        }
        for name, values in parts.items():
            terms = terms + (torch.tensor(getattr(slopes, name)[own]) * values).sum()
    terms.backward()
    reference = reference_of(model)
    assert reference.logits(SEQUENCES) == pytest.approx(np.concatenate(read), abs=2e-5)
    found, sizes = reference.gradients(SEQUENCES, slopes)
    for name, weight in model.named_parameters():
        assert found[name] == pytest.approx(weight.grad.numpy(), abs=5e-4), name
        assert (sizes[name] >= np.abs(found[name]) - 1e-12).all()


def test_scores_are_transformers():
    model = model_of("score", num_labels=1, pad_token_id=0)
    right = [model(torch.tensor(ids)[None]).logits.squeeze() for ids in SEQUENCES]
    assert reference_of(model).scores(SEQUENCES) == pytest.approx([float(one) for one in right], abs=2e-5)
    (2.0 * right[0] - right[1]).backward()
    found, _ = reference_of(model).gradients(SEQUENCES, Slopes(scores_S=np.array([2.0, -1.0])))
    assert found["score.weight"] == pytest.approx(model.score.weight.grad.numpy(), abs=5e-4)


def test_adapters_are_pefts():
    from peft import LoraConfig

    model = model_of("llama")
    model.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.double()
    right = model(torch.tensor(SEQUENCES[0])[None]).logits[0, :-1].detach().numpy()
    assert reference_of(model, lora_scale=3.0).logits(SEQUENCES[:1])[1:] == pytest.approx(right, abs=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "a reference of gpt2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of the type yarn"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"sliding_window": 8}, "sliding windows"),
    ],
)
def test_other_models_are_named(changes, words):
    assert words in why_unknown({"model_type": "llama", **changes}) and not why_unknown({"model_type": "llama"})
