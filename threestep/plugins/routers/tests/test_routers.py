"""The balancing loss of routers: by hand, as transformers computes it, and who has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.families.builds import draw_weights
from tests.families.configs import tiny_config
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.routers.routers import RouterRecord, balance_of, balancing_loss, largest_load, router_sums
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt, unshared
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "jetmoe", "dbrx"]


def tiny(family: str, **changes: Any) -> Any:
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
    draw_weights(model, seed=0)
    return model


def run(count: int, seed: int, is_target: bool) -> TokenSequence:
    ids = torch.randint(3, 55, (count,), generator=torch.Generator().manual_seed(seed))
    return TokenSequence(ids, torch.full((count,), is_target))


def test_the_worked_example():
    logits_tE = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    sums = router_sums([logits_tE], torch.tensor([1, 1, 0]), top_k=1)
    assert sums.chosen_LE.tolist() == [[2.0, 0.0]] and float(sums.tokens) == 2.0
    assert sums.probability_E.tolist() == pytest.approx([1.5, 0.5])
    loss = balancing_loss(sums.probability_E, sums)
    assert float(loss) == pytest.approx(1.5)
    assert largest_load(sums) == 2.0
    # d loss / d logit = 2 f_1 / 2 x p_1 (1 - p_1) for the first expert, which both tokens choose; padding has none.
    (gradient,) = torch.autograd.grad(loss, logits_tE)
    assert gradient[:, 0].tolist() == pytest.approx([0.09, 0.24, 0.0])


def test_it_is_that_of_transformers_over_two_layers_with_padding():
    generator = torch.Generator().manual_seed(1)
    logits = tuple(torch.randn(12, 5, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    sums = router_sums(logits, mask.flatten(), top_k=2)
    expected = load_balancing_loss_func(logits, 5, 2, mask)
    assert float(balancing_loss(sums.probability_E, sums)) == pytest.approx(float(expected), rel=1e-6)


def test_parts_add_up_to_the_whole():
    logits = torch.randn(10, 4, generator=torch.Generator().manual_seed(2))
    copies = torch.tensor([1, 2, 1, 3, 1, 0, 1, 1, 2, 1])
    whole = router_sums([logits], copies, top_k=2)
    parts = [router_sums([logits[part]], copies[part], top_k=2) for part in (slice(0, 4), slice(4, 10))]
    added = sum(float(balancing_loss(part.probability_E, whole)) for part in parts)
    assert added == pytest.approx(float(balancing_loss(whole.probability_E, whole)), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_loss_is_its_own_for_any_layout(family):
    """Against `aux_loss` of transformers over separate sequences, padded; packed with a shared prompt here."""
    model = tiny(family, **({"sliding_window": None} if family in ("mixtral", "qwen3_moe") else {}))
    document = shared_prompt(run(5, 1, False), [run(3, 2, True), run(4, 3, True)])
    alone = [part.segments[0].tokens.input_ids for part in unshared(document)]
    width = max(len(ids) for ids in alone)
    padded = torch.stack([torch.nn.functional.pad(ids, (0, width - len(ids))) for ids in alone])
    mask = torch.stack([(torch.arange(width) < len(ids)).long() for ids in alone])
    with torch.no_grad():
        theirs = model(input_ids=padded, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    balance = balance_of(model, None)
    assert balance.said == f"router loss {balance.coefficient:g} (the model's own)"
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    record, policy = RouterRecord(model), PolicyModel(model)
    layouts = [[[plain(part.segments[0].tokens)] for part in unshared(document)]]
    if family not in ("gpt_oss",):  # whose attention takes no mask of segments
        layouts.append([[document]])
    for layout in layouts:
        rows = packed_rows(layout, pad_token_id=0)
        policy(rows)
        sums = router_sums(record.take(), rows.copies_NT().flatten(), balance.top_k)
        assert float(balancing_loss(sums.probability_E, sums)) == pytest.approx(float(theirs), rel=1e-5)


def test_forwards_without_gradients_are_recorded_where_asked():
    model = tiny("mixtral")
    record = RouterRecord(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model.base_model(input_ids=ids)
        with pytest.raises(AssertionError, match="no forward has been recorded"):
            record.take()
        with record.without_gradients():
            assert "router_logits" in model.base_model(input_ids=ids)
    assert [logits.shape for logits in record.take()] == [(3, 4), (3, 4)]


def test_who_has_no_loss_and_why():
    without = "routers are trained without a balancing loss"
    assert balance_of(tiny_causal_lm("llama"), None) is None
    assert balance_of(tiny_causal_lm("llama"), 0.0) is None
    assert balance_of(tiny("mixtral"), 0.0).said == f"{without}, as asked"
    assert balance_of(tiny("mixtral"), 0.3).said == "router loss 0.3 (--router_aux_loss_coef)"
    assert balance_of(tiny("mixtral", router_aux_loss_coef=0.0), None).said.startswith(f"{without}: the model's own")
    biased = tiny("glm4_moe")
    assert balance_of(biased, None).said == (
        f"{without}: the family has no coefficient; --router_aux_loss_coef sets one"
    )
    assert balance_of(biased, 0.01).coefficient == 0.01


def test_a_coefficient_that_can_do_nothing_is_refused():
    with pytest.raises(ThreestepError, match="--router_aux_loss_coef expects a mixture of experts .* LlamaForCausalLM"):
        balance_of(tiny_causal_lm("llama"), 0.1)
    doge = AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", is_moe=True, **DOGE))
    assert balance_of(doge, None).said.endswith("DogeForCausalLM routes by product keys, whose loss is not built here")
    with pytest.raises(ThreestepError, match="DogeForCausalLM routes by product keys; leave it out or give it 0"):
        balance_of(doge, 0.1)
    nameless = tiny("aria_text")
    with pytest.raises(ThreestepError, match="does not say in its configuration how many experts a token goes to"):
        balance_of(nameless, 0.1)


DOGE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts": 16, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
