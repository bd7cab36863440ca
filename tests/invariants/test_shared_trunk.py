"""--share_trunk trains what two separate models with the same weights train, and keeps their trunk once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForSequenceClassification

from tests.invariants import ppo_program, tiny
from tests.invariants.launched import each_case
from threestep.plugins.lora import adding
from training.utils.contracts.documents import join
from training.utils.engine.ranks.collectives import barrier
from training.utils.layout.rows import padded_rows
from training.utils.loading.saving import plain_skeleton
from training.utils.models.token_model import Readout


@dataclass(frozen=True)
class Case:
    """One run. Stages: of ZeRO."""

    actor_stage: int
    critic_stage: int
    dtype: str = "fp32"
    packed: bool = False
    offload: bool = False


CASES = {
    "z0": Case(0, 0, packed=True),
    "z2": Case(2, 2),
    "z3": Case(3, 3),
    "z0_bf16": Case(0, 0, "bf16", packed=True),
    "z1_z0": Case(1, 0),
    "z2_bf16": Case(2, 2, "bf16"),
    "z2_offload": Case(2, 2, offload=True),
}
ORDINARY = {1: ("z0",), 2: ("z3",)}  # by ranks
KINDS = ("shared", "apart")
ACTOR_DIM, CRITIC_DIM = 4, 3


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """Run step 3 with --share_trunk, and with two models of the same weights beside it, see `compared`."""
    with drawn_alike():
        critic = out / "critic"
        save_critic_apart(models, critic)  # transformers saves on the first rank alone
        barrier()
        names = CASES if is_long else ORDINARY[ranks.world_size]
        return {name: compared(CASES[name], models, critic, out, ranks) for name in names}


@contextlib.contextmanager
def drawn_alike() -> Iterator[None]:
    """Inside, what trains is drawn from a seed of its role, also what would start with 0."""
    own = adding.add_lora

    def drawn(model: Any, settings: Any) -> Any:
        model = own(model, settings)
        generator = torch.Generator().manual_seed(settings.lora_dim)
        for weight in model.parameters():
            if weight.requires_grad:
                values = 0.1 * torch.randn(getattr(weight, "ds_shape", weight.shape), generator=generator)
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):  # whole ones as they are
                    weight.data.copy_(values)
        return model

    adding.add_lora = drawn
    yield
    adding.add_lora = own


def save_critic_apart(models: Path, folder: Path) -> None:
    """A scalar model of its own with the actor's trunk; it is the reward model too."""
    torch.manual_seed(0)
    critic = LlamaForSequenceClassification(tiny.config(num_labels=1))
    critic.model.load_state_dict(AutoModelForCausalLM.from_pretrained(models / "actor").model.state_dict())
    critic.save_pretrained(folder)


def make_trainer(kind: str, case: Case, models: Path, critic: Path, out: Path, ranks: Any) -> Any:
    def changed(flags: Any) -> Any:
        return replace(
            flags,
            actor_zero_stage=case.actor_stage,
            critic_zero_stage=case.critic_stage,
            offload=case.offload,
            critic_model_name_or_path=str(critic),
        )

    lora = {"actor_lora_dim": ACTOR_DIM, "critic_lora_dim": CRITIC_DIM, "share_trunk": kind == "shared"}
    return ppo_program.make_trainer(
        models, out, ranks, 0, lora=lora, packed=case.packed, dtype=case.dtype, changed=changed
    )


def compared(case: Case, models: Path, critic: Path, out: Path, ranks: Any) -> dict[str, Any]:
    """apart: the largest distance between the two kinds, of what is read at the start and the end and of what every
    update says. moved: of the shared models' numbers from start to end, by role. weights: by kind, see `counted`."""
    read: dict[str, list[dict[str, torch.Tensor]]] = {}
    figures, weights, last = {}, {}, None
    for kind in KINDS:
        last = make_trainer(kind, case, models, critic, out, ranks)
        read[kind] = [numbers(last.roles)]
        figures[kind] = []
        for iteration in range(1, ppo_program.ITERATIONS + 1):  # each of two updates
            experience = ppo_program.experienced(last, iteration)
            figures[kind].append({**last.learn([experience], iteration), "rolled": experience.read.values_BR.tolist()})
        read[kind].append(numbers(last.roles))
        weights[kind] = counted(last.roles)
        if kind == "shared":
            separate = one_at_a_time(last, ppo_program.ITERATIONS)
            merged = merged_critic(last.roles, out / f"merged_{ranks.rank}")
    start, end = read["shared"]
    return {
        "apart": [distance(one, other) for one, other in zip(read["shared"], read["apart"], strict=True)],
        "figures": figures["shared"] == figures["apart"],
        "moved": {role: distance({role: start[role]}, {role: end[role]}) for role in start},
        "weights": weights,
        "one_at_a_time": separate,
        "merged": merged,
    }


SEQUENCES = [([5, 9, 100], [33, 44, 55, 0]), ([7], [8, 200, 31, 4, 77, 0])]  # prompt and response


def laid_out() -> Any:
    return padded_rows([join(torch.tensor(prompt), torch.tensor(response)) for prompt, response in SEQUENCES], 1)


def numbers(roles: Any) -> dict[str, torch.Tensor]:
    """What each role reads on SEQUENCES."""
    rows, readout = laid_out(), Readout(ppo_program.TEMPERATURE)
    with roles.reading(), torch.no_grad():
        return {
            "actor": roles.actor(rows, readout).logprobs_M,
            "reference": roles.reference(rows, readout).logprobs_M,
            "critic": roles.critic(rows, at="targets"),
        }


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max(float((some[name].double() - others[name].double()).abs().max()) for name in some)


def counted(roles: Any) -> dict[str, int]:
    """in_memory: elements of actor and critic on this rank, tensors at one place once. frozen: of the actor alone.
    common: those at one place that both have."""

    def places(model: Any) -> dict[int, Any]:
        kept = [(getattr(w, "ds_tensor", w), w.requires_grad) for w in model.parameters()]
        return {tensor.data_ptr(): tensor.detach().requires_grad_(trains) for tensor, trains in kept}

    actor, critic = places(roles.actor_model), places(roles.critic_model)
    return {
        "in_memory": sum(weight.numel() for weight in {**actor, **critic}.values()),
        "trainable": sum(w.numel() for part in (actor, critic) for w in part.values() if w.requires_grad),
        "frozen": sum(weight.numel() for weight in actor.values() if not weight.requires_grad),
        "common": sum(actor[place].numel() for place in actor.keys() & critic.keys()),
    }


def one_at_a_time(trainer: Any, iteration: int) -> dict[str, float]:
    """How far an update of one role moves its own weights, and all weights of the other."""
    roles = trainer.roles
    sides = {"actor": (roles.actor, roles.actor_model), "critic": (roles.critic, roles.critic_model)}
    experience = ppo_program.experienced(trainer, iteration)
    found = {}
    for name in sides:
        other = roles.critic if name == "actor" else roles.actor
        step, backward = other.step, other.backward
        # The other's turn is left out of this update.
        other.step, other.backward = Nothing, lambda loss: None
        before = {side: whole(*sides[side]) for side in sides}
        trainer.learn([experience], iteration)
        found |= {f"{name}_moves_{side}": distance(before[side], whole(*sides[side])) for side in sides}
        other.step, other.backward = step, backward
    return found


class Nothing:
    """The report of a step that was not taken."""

    def figures(self, group: str) -> dict[str, float]:
        return {}


def whole(engine: Any, model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.full_tensors(model)}


def merged_critic(roles: Any, folder: Path) -> float:
    """How far the critic's values are from the scores of the model that plain transformers loads from what is saved."""
    with roles.reading(), torch.no_grad():
        values_B = roles.critic(laid_out(), at="end")
    state = roles.critic.full_state(roles.critic_model)
    if not roles.critic.ranks.is_main:
        return 0.0
    plain = plain_skeleton(roles.critic_model)
    plain.load_state_dict(state, assign=True, strict=True)
    plain.save_pretrained(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = [float(loaded(torch.tensor([prompt + response])).logits) for prompt, response in SEQUENCES]
    return max(abs(value - score) for value, score in zip(values_B.tolist(), scores, strict=True))


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),  # on a busy machine
    pytest.mark.parametrize("size, case", each_case({1: CASES, 2: CASES}, ORDINARY)),
]


@pytest.fixture
def found(launched, size, case):
    """The reports of all ranks on one case."""
    _, reports = launched("test_shared_trunk", size)
    return [{**report[case], "dtype": CASES[case].dtype} for report in reports]


def test_it_learns_what_two_separate_models_learn(found):
    """Log-probabilities, the reference's, values and every figure of four updates: the sums are the same ones, so to
    the last bit."""
    for report in found:
        assert report["apart"] == [0.0, 0.0] and report["figures"]
        assert report["moved"]["reference"] == 0.0
        assert report["moved"]["actor"] > 0.01 and report["moved"]["critic"] > 0.01


def test_the_trunk_is_in_memory_once(found):
    for report in found:
        shared, apart = report["weights"]["shared"], report["weights"]["apart"]
        assert shared["in_memory"] == shared["frozen"] + shared["trainable"]
        assert apart["in_memory"] - shared["in_memory"] == shared["common"] > shared["frozen"] / 2
        assert apart["common"] == 0 and apart["trainable"] == shared["trainable"]


def test_an_update_of_one_role_leaves_the_other_alone(found):
    for report in found:
        moved = report["one_at_a_time"]
        assert moved["actor_moves_critic"] == moved["critic_moves_actor"] == 0.0
        assert moved["actor_moves_actor"] > 1e-4 and moved["critic_moves_critic"] > 1e-4


def test_the_critic_that_is_saved_scores_in_plain_transformers(found):
    """In bfloat16 attention of short rows is computed in float32 here and in bfloat16 there: scores near 1 then differ
    by a few of their last bits, 2**-8 each. That the merge is right is shown in float32."""
    assert found[0]["merged"] < (2**-6 if found[0]["dtype"] == "bf16" else 1e-5)
