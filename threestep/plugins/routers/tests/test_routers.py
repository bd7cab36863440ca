"""The balancing loss of routers: by hand, as transformers computes it, and who has one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralForCausalLM, MixtralForSequenceClassification
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.families.builds import draw_weights
from tests.families.configs import tiny_config
from tests.invariants.tiny import mixture
from tests.support.plain_roles import plain_roles
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.routers.checks import step_needs
from threestep.plugins.routers.expert_log import recording_way
from threestep.plugins.routers.feature import RoutersFeature
from threestep.plugins.routers.routers import RouterRecord, balance_of, balancing_loss, largest_load, router_sums
from threestep.plugins.routers.step_loss import RouterLoss, router_losses
from training.step3_ppo.flags.checks import ROLES, checked_components
from training.step3_ppo.parts.assembly import check_reused, deciding_settings, with_guests
from training.step3_ppo.roles.roles import Roles
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS
from training.utils.generation.partners import Partners
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel
from training.utils.plugins.plugin import StepNeeds
from training.utils.setup.guests import GuestFeatures

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
    without = "the routers are trained without a balancing loss"
    assert balance_of(tiny_causal_lm("llama"), None) is None
    assert balance_of(tiny_causal_lm("llama"), 0.0) is None
    assert balance_of(tiny("mixtral"), 0.0).said == f"{without}, as asked"
    assert balance_of(tiny("mixtral"), 0.3).said == "router loss 0.3 (--router_aux_loss_coef)"
    assert balance_of(tiny("mixtral", router_aux_loss_coef=0.0), None).said.startswith(f"{without}: the model's own")
    biased = tiny("glm4_moe")
    assert balance_of(biased, None).said == (
        f"{without}: this model family defines no coefficient; set one with --router_aux_loss_coef"
    )
    assert balance_of(biased, 0.01).coefficient == 0.01


def test_a_coefficient_that_can_do_nothing_is_refused():
    with pytest.raises(ThreestepError, match="--router_aux_loss_coef needs a mixture of experts .* LlamaForCausalLM"):
        balance_of(tiny_causal_lm("llama"), 0.1)
    doge = AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", is_moe=True, **DOGE))
    assert balance_of(doge, None).said.endswith(
        "DogeForCausalLM routes by product keys, for which Threestep has no balancing loss"
    )
    with pytest.raises(
        ThreestepError, match="DogeForCausalLM routes by product keys; leave --router_aux_loss_coef out, or set it to 0"
    ):
        balance_of(doge, 0.1)
    nameless = tiny("aria_text")
    with pytest.raises(ThreestepError, match="its configuration does not specify the number of experts per token"):
        balance_of(nameless, 0.1)


DOGE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts": 16, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip


def engine_of(model: Any) -> Any:
    """All that a router loss asks of an engine. forwards: (has gradients, targets) of each."""
    policy, forwards = PolicyModel(model), []

    def forward(rows: TokenRows) -> Any:
        forwards.append((torch.is_grad_enabled(), rows.target_ids_M.numel()))
        return policy(rows)

    class Engine(SimpleNamespace):
        __call__ = staticmethod(forward)

    return Engine(ranks=SimpleNamespace(device=torch.device("cpu"), is_main=True), forwards=forwards)


def loss_of(engine: Any, model: Any, coefficient: float) -> RouterLoss:
    [found] = router_losses([(engine, model)], coefficient)
    assert found is not None
    return found


def forward_of(engine: Any) -> Any:
    return lambda index, rows: engine(rows)


def rows_of(*lengths: int) -> list[TokenRows]:
    return [packed_rows([[plain(run(length, length, False))]], 0) for length in lengths]


def test_a_model_without_routers_pays_nothing(capsys):
    model = tiny_causal_lm("llama")
    engine = engine_of(model)
    assert router_losses([(engine, model)], None) == [None] and capsys.readouterr().out == ""
    assert engine.forwards == []


def test_several_micro_batches_are_counted_first_and_one_is_not(capsys):
    model = tiny("mixtral")
    engine = engine_of(model)
    routers = loss_of(engine, model, 0.5)
    assert capsys.readouterr().out == "MixtralForCausalLM: router loss 0.5 (--router_aux_loss_coef)\n"
    together = packed_rows([[plain(run(4, 4, False))], [plain(run(6, 6, False))]], 0)
    step = routers.begin([together], forward_of(engine))
    assert engine.forwards == []
    engine(together)
    whole = step.loss_part(together)
    apart = rows_of(4, 6)
    step_apart = routers.begin(apart, forward_of(engine))
    assert engine.forwards[1:] == [(False, 0), (False, 0)]
    parts = []
    for rows in apart:
        engine(rows)
        parts.append(step_apart.loss_part(rows))
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    assert step_apart.end("train") == pytest.approx(step.end("train"), rel=1e-6)
    assert step.end("train")["train/router_loss"] == pytest.approx(2.0 * float(whole), rel=1e-6)


def test_dropout_draws_the_same_when_the_load_is_counted():
    model = tiny("mixtral", attention_dropout=0.5).train()
    routers = loss_of(engine_of(model), model, 1.0)
    engine = routers.engine
    rows = rows_of(9, 12)
    torch.manual_seed(3)
    step = routers.begin(rows, forward_of(engine))
    total = 0.0
    for part in rows:
        engine(part)
        total += float(step.loss_part(part))
    assert total == pytest.approx(step.end("train")["train/router_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("family", "coefficient", "twice"), [("llama", None, False), ("mixtral", None, True), ("mixtral", 0.0, False)]
)
def test_whose_forwards_are_read_twice(family, coefficient, twice):
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert RoutersFeature(coefficient).reads_twice(model) == twice


def roles_of(actor: bool, critic: bool) -> Roles:
    """With a mixture of experts as actor, as critic, or both."""
    roles, _ = plain_roles(None)
    if actor:
        roles.actor.module.model = MixtralForCausalLM(mixture())
    if critic:
        config = mixture(num_labels=1, router_aux_loss_coef=0.0)
        roles.critic.module.model = MixtralForSequenceClassification(config)
    return roles


def balanced(mixtures: tuple[bool, bool], given: float | None, **reused: bool) -> Roles:
    features = GuestFeatures([RoutersFeature(given)])
    roles = with_guests(roles_of(*mixtures), features, path="", total_steps=1, seed=0)
    check_reused(ppo_flags(**reused).ppo, roles)
    return roles


@pytest.mark.parametrize(
    ("mixtures", "given", "coefficients"),
    [
        ((True, True), None, [0.7, None]),  # the critic's own is 0
        ((True, True), 0.3, [0.3, 0.3]),
        ((True, False), 0.3, [0.3, None]),
        ((False, True), 0.3, [None, 0.3]),
        ((True, True), 0.0, [None, None]),
        ((False, False), None, [None, None]),
    ],
)
def test_whose_routers_are_balanced(mixtures, given, coefficients):
    roles = balanced(mixtures, given)
    losses = (roles.actor_guests, roles.critic_guests)
    assert [guests[0].balance.coefficient if guests else None for guests in losses] == coefficients
    with pytest.raises(ThreestepError, match="--router_aux_loss_coef needs a mixture of experts .* LlamaForCausalLM"):
        balanced((False, False), 0.3)


@pytest.mark.parametrize("name", ROLES)
def test_forwards_that_are_reused_know_no_load_of_the_step(name):
    reused = {name: True}
    mixtures = (ROLES[name] == "actor", ROLES[name] == "critic")
    with pytest.raises(ThreestepError, match=f"--{name} learns from .*; set --router_aux_loss_coef 0, or remove"):
        balanced(mixtures, 0.3, **reused)
    balanced(mixtures, 0.0, **reused)
    balanced(mixtures[::-1], 0.3, **reused)


def flags_of(**given):
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    return ppo_flags(**{**names, "replay_routers": "follow", **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not record them; use --rollout_engine hf"),
        ({"parallel_thinking": True}, "--parallel_thinking generates paths side by side, which record no experts"),
        ({"speculate": "1", "speculate_by": "ngram"}, "--speculate 1 verifies several tokens at once"),
    ],
)
def test_what_does_not_go_with_it(given, why):
    with pytest.raises(ThreestepError) as raised:
        checked_components(flags_of(**given))
    assert "--replay_routers follow" in str(raised.value) and why in str(raised.value)


def test_what_replayed_experts_ask_for():
    assert deciding_settings(flags_of(), Partners()) == {"experts": True}  # a dump says whether it has them
    assert deciding_settings(flags_of(replay_routers="none"), Partners()) == {}
    checked_components(flags_of())
    assert not RoutersFeature().records_experts and step_needs(ppo_flags()).own_forwards == ""
    assert RoutersFeature(replay="compare").records_experts
    needs = step_needs(ppo_flags(replay_routers="compare"))
    assert needs == StepNeeds({}, "experts are replayed (--replay_routers)")
    assert recording_way(FIXED, "Model") is MASKED and recording_way(WAYS[1], "Model") is WAYS[1]
    with pytest.raises(ThreestepError, match="--replay_routers needs batches with prompts of different lengths"):
        recording_way(WAYS[2], "Model")
