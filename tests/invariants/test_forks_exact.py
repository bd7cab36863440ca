"""Random sets of conversations that fork, under DeepSpeed: the losses and gradients of actor and critic are those of
plain PyTorch on their parts, one by one in float64, and each conversation is trained once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.invariants.ppo_program import ONE, SHARED, STAGES, TWO, World, make_trainer
from tests.support.shared_rows import sharing_rows
from tests.support.step3_records import changed
from tests.support.tries import forked_conversations, forked_sequences
from training.step3_ppo.experience.sequences import TrainingSequence
from training.step3_ppo.learning.learning import Learner
from training.utils.engine.ranks.collectives import gathered

CLIP, CLIP_VALUE, TEMPERATURE = 0.1, 0.2, 0.8  # of ppo_program.make_trainer
MOST_NODES = 64
# How the sequences of a seed are laid out, in turns: packed, tokens a micro-batch, from how many tokens on is shared.
PLANS = ((True, 600, 1), (True, 200, 2), (True, 400, 0), (False, 200, 0))


def on_ranks(
    ranks: Any, models: Path, out: Path, is_long: bool, size: int, stage: int, seeds: list[int]
) -> dict[str, Any]:
    """Take a step of actor and critic on random conversations that fork, many times, beside plain PyTorch in float64 on
    their parts one by one, each row over `size` ranks. Return {seed: {what: how far apart}}."""
    how: dict[str, Any] = {"decay": 0.0, "packed": True, "with_texts": False, "changed": _keeping_gradients}
    sharing = sharing_rows(ranks, size) if size > 1 else ranks
    trainer, plain = make_trainer(models, out, sharing, stage, **how), _plain_models(models)
    return {str(seed): one_try(trainer, plain, seed, PLANS[at % len(PLANS)]) for at, seed in enumerate(seeds)}


def _keeping_gradients(flags: Any) -> Any:
    """AdamW's first moment is the gradient itself, not clipped, and the weights stay as they are: 1e-30 is added."""
    return dataclasses.replace(
        flags, adam_beta1=0.0, max_grad_norm=1e9, actor_learning_rate=1e-30, critic_learning_rate=1e-30
    )


def _plain_models(models: Path) -> dict[str, Any]:
    return {
        "actor": AutoModelForCausalLM.from_pretrained(models / "actor", dtype=torch.float64),
        "critic": AutoModelForSequenceClassification.from_pretrained(models / "scalar", dtype=torch.float64),
    }


def one_try(trainer: Any, plain: dict[str, Any], seed: int, how: tuple[bool, int, int]) -> dict[str, float]:
    """Return how far the step's losses are from plain PyTorch's, its gradients as shares of their norm, and how many
    conversations are not trained once, as they were drawn. how: one of PLANS."""
    torch.manual_seed(seed)
    drawn = drawn_sequences(seed)
    read = {role: [read_plain(plain[role], role, each.parts) for each in drawn] for role in plain}
    sequences = [experienced(number, *each) for number, each in enumerate(zip(drawn, *read.values(), strict=True))]
    learner = learner_with(trainer, *how)
    forwards = learner.forwards(sequences)
    first = trainer.ranks.rank % trainer.ranks.sharing.size == 0  # of those that share rows
    trained = [pair for forward in forwards if first for pair in targets_of(forward, sequences)]
    found: dict[str, float] = {"untrained": untrained(drawn, [pair for own in gathered(trained) for pair in own])}
    figures = learner.learn(sequences, seed, forwards)
    wanted = plain_losses(sequences, *read.values())
    for role, loss_name in (("actor", "actor/policy_loss"), ("critic", "critic/value_loss")):
        loss, clipped = wanted[loss_name], f"{role}/clip_fraction"
        plain[role].zero_grad()
        loss.backward()
        got = dict(gradients(getattr(trainer.roles, role)))
        want = torch.cat([part.grad.flatten() for part in plain[role].parameters()])
        apart = torch.cat([got[name].double().flatten() for name, _ in plain[role].named_parameters()]) - want
        found[f"{role} gradient"] = float(apart.norm() / want.norm())
        found[f"{role} loss"] = abs(figures[loss_name] - float(loss.detach()))
        found[clipped], found[f"{clipped} of it"] = abs(figures[clipped] - wanted[clipped]), wanted[clipped]
    return found


def learner_with(trainer: Any, packed: bool, most: int, least: int) -> Any:
    experience = trainer.settings.experience
    experience = changed(
        experience, packed=packed, max_row_tokens=most if packed else 0, max_tokens_per_micro_batch=most,
        least_shared_tokens=least,
    )  # fmt: skip
    return Learner(trainer.roles, experience, trainer.settings.updates.learning, kl_coef=0.0)


def drawn_sequences(seed: int) -> list[Any]:
    """What several conversations drew: sequences with equal beginnings, and conversations in parts."""
    found = [each for each in forked_sequences(seed, MOST_NODES) if each.is_target.any()]
    return found + [each.tokens for each in forked_conversations(seed, MOST_NODES)]


def read_plain(model: Any, role: str, parts: Any) -> Any:
    """Of the targets of the parts of one conversation: log-probabilities, or values. Each part by itself."""
    found = []
    for part in parts:
        places = torch.nonzero(part.is_target).flatten()
        states_TD = model.model(input_ids=part.input_ids.unsqueeze(0), use_cache=False)[0][0]
        if role == "critic":
            found.append(model.score(states_TD)[places - 1, 0])
        else:
            logprobs_TV = torch.log_softmax(model.lm_head(states_TD) / TEMPERATURE, dim=-1)
            found.append(logprobs_TV[places - 1, part.input_ids[places]])
    return torch.cat(found)


def experienced(number: int, tokens: Any, logprobs_r: Any, values_r: Any) -> Any:
    """A sequence with an old policy, old values, advantages and returns near what the models say now, so that every
    side of both clips is met; none so near a border that float32 could take it for the other side."""
    count = len(logprobs_r)

    def one_of(*choices: float) -> Any:
        picked = torch.tensor(choices, dtype=torch.float64)[torch.randint(len(choices), (count,))]
        return picked + 0.01 * torch.rand(count, dtype=torch.float64)

    old_r = logprobs_r.detach() - one_of(-0.4, -0.2, -0.05, 0.02, 0.2, 0.4)
    # Values that were 0.3 lower are clipped to 0.1 below themselves; returns stand at none of the two, nor between.
    old_values_r = values_r.detach() - one_of(-0.5, -0.3, -0.1, 0.1, 0.3, 0.5)
    returns_r = values_r.detach() + one_of(-1.0, -0.02, 0.03, 1.0)
    columns = (torch.randn(count), old_r.float(), None, old_values_r.float(), returns_r.float(), None)
    return TrainingSequence(number, tokens, number % 5 < 4, *columns)


def plain_losses(sequences: list[Any], logprobs: list[Any], values: list[Any]) -> dict[str, Any]:
    """PPO's clipped loss and the clipped value loss, means over the tokens that count."""
    counted = [each.counts for each in sequences]
    pick = [place for place, counts in enumerate(counted) if counts]
    columns = {name: torch.cat([getattr(sequences[place], name).double() for place in pick]) for name in (
        "advantages_r", "old_logprobs_r", "values_r", "returns_r")}  # fmt: skip
    ratio = (torch.cat([logprobs[place] for place in pick]) - columns["old_logprobs_r"]).exp()
    gains = ratio * columns["advantages_r"], ratio.clamp(1 - CLIP, 1 + CLIP) * columns["advantages_r"]
    now, before = torch.cat([values[place] for place in pick]), columns["values_r"]
    held = torch.minimum(torch.maximum(now, before - CLIP_VALUE), before + CLIP_VALUE)
    errors = [(each - columns["returns_r"]) ** 2 for each in (now, held)]
    return {
        "actor/policy_loss": -torch.minimum(*gains).mean(),
        "actor/clip_fraction": float((gains[1] < gains[0]).double().mean()),
        "critic/value_loss": 0.5 * torch.maximum(*errors).mean(),
        "critic/clip_fraction": float((errors[1] > errors[0]).double().mean()),
    }


def targets_of(forward: Any, sequences: list[Any]) -> Iterator[tuple[int, list[int]]]:
    """(number, ids) of each sequence whose targets a forward has."""
    numbers = list(forward.numbers)
    sizes = [len(sequences[number].advantages_r) for number in numbers]
    if numbers:
        for number, ids in zip(numbers, forward.rows.target_ids_M.split(sizes), strict=True):
            yield number, ids.tolist()


def untrained(drawn: list[Any], trained: list[tuple[int, list[int]]]) -> int:
    """How many conversations are not trained once, as they were drawn. trained: of all ranks."""
    times = [[ids for number, ids in trained if number == place] for place in range(len(drawn))]
    wanted = [[token for part in each.parts for token in part.input_ids[part.is_target].tolist()] for each in drawn]
    return sum(found != [ids] for found, ids in zip(times, wanted, strict=True))


def gradients(engine: Any) -> Iterator[tuple[str, Any]]:
    """(name, the gradient that the optimizer applied) of each weight of an engine's model. A collective."""
    stage, optimizer = engine.settings.zero_stage, engine.engine.optimizer
    if stage in (1, 2):  # DeepSpeed 0.19 links all when the first group of weights has stepped, and the second has none
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, weight in engine.module.model.named_parameters():
        yield name, (safe_get_full_optimizer_state(weight, "exp_avg") if stage else optimizer.state[weight]["exp_avg"])


TRIES = 1000
RUNS = [(world, stage) for world in (ONE, TWO, SHARED) for stage in STAGES]
LOSS, GRADIENT = 1e-6, 1e-5  # in float32; of the gradient's norm
LONG = [
    pytest.param(*run, list(range(place, TRIES, len(RUNS))), marks=pytest.mark.long) for place, run in enumerate(RUNS)
]


@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "stage", "seeds"), [(ONE, 2, list(range(len(PLANS)))), *LONG])
def test_a_step_on_forks_is_that_of_their_parts(launched, world: World, stage: int, seeds: list[int]):
    found = launched("test_forks_exact", world[0], size=world[1], stage=stage, seeds=seeds)[1][0]
    assert sorted(map(int, found)) == seeds
    for seed, apart in found.items():
        assert apart["untrained"] == 0, seed
        assert max(apart["actor/clip_fraction"], apart["critic/clip_fraction"]) < 1e-6, (seed, apart)
        assert max(apart["actor loss"], apart["critic loss"]) < LOSS, (seed, apart)
        assert max(apart["actor gradient"], apart["critic gradient"]) < GRADIENT, (seed, apart)
    for role in ("actor", "critic"):  # both sides of the clips are met
        clipped = [apart[f"{role}/clip_fraction of it"] for apart in found.values()]
        assert 0.1 < sum(clipped) / len(clipped) < 0.7
