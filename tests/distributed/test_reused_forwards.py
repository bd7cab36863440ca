"""After the checks of the start, with nothing that sets a mode later (`--reuse_forwards`, `--reuse_values`): actor and
critic are in train mode, so that gradient checkpointing recomputes; and models whose forwards are noisy in it are
refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.families.builds import build

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine

SCRIPT = """
    import sys
    import torch
    from types import SimpleNamespace
    from tests.distributed.launch import report
    from tests.families.builds import NoTokenizer
    from tests.families.subjects import drawn_ids
    from training.step3_ppo.parts.assembly import check_reused, checked_roles
    from training.step3_ppo.roles.roles import RolesNeeded, load_roles
    from training.step3_ppo.roles.roles import Tokenizers
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.utils.setup.guests import GuestFeatures
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.contracts.documents import TokenSequence
    from training.utils.layout.rows import padded_rows
    from training.utils.base.errors import ThreestepError

    def roles_of(place, family, **changes):
        flags = RolesArguments(
            actor_model_name_or_path=f"{place}/{family}", critic_model_name_or_path=f"{place}/{family}_scalar",
            dtype="fp32", actor_gradient_checkpointing=True,
            critic_gradient_checkpointing=True, **changes,
        )
        tokenizers = Tokenizers(NoTokenizer(), NoTokenizer())
        roles = load_roles(flags, tokenizers, ranks, 1, longest_tokens=12, needed=RolesNeeded(reference=False))
        ppo = SimpleNamespace(padded=False, reuse_forwards=True, reuse_values=True)
        data = SimpleNamespace(chat=ChatArguments(), form=None, needs_segments=None)
        given = SimpleNamespace(ppo=ppo, roles=flags, data=data, guests=GuestFeatures(), longest_tokens=12)
        check_reused(ppo, roles)
        return checked_roles(given, roles)

    def calls_of_a_layer(engine, model, loss_of):
        calls = []
        model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        ids_T = drawn_ids(8, 1)
        engine.backward(loss_of(engine(padded_rows([TokenSequence(ids_T, torch.arange(8) > 3)], 0))))
        return len(calls)

    def refused(place, family, **changes):
        try:
            roles_of(place, family, **changes)
        except ThreestepError as mistake:
            return str(mistake)
        return ""

    with started_process_group() as ranks:
        place = sys.argv[1]
        roles = roles_of(place, "llama")
        trained = ((roles.actor, roles.actor_model), (roles.critic, roles.critic_model))
        told = {"training": [[part.training for part in engine.module.modules()] for engine, _ in trained]}
        told["calls"] = [
            calls_of_a_layer(*trained[0], lambda read: read.logprobs_M.sum()),
            calls_of_a_layer(*trained[1], lambda read: read.sum()),
        ]
        told["noisy_actor"] = refused(place, "gpt2", actor_dropout=None)
        told["noisy_critic"] = refused(place, "gpt2", critic_dropout=None)
        told["quiet"] = refused(place, "llama", actor_dropout=None, critic_dropout=None)
        report(told)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    place: Path = tmp_path_factory.mktemp("models")
    for family in ("llama", "gpt2"):
        rates = {"resid_pdrop": 0.2} if family == "gpt2" else {"attention_dropout": 0.0}
        build(family, place / family, **rates)
        build(family, place / f"{family}_scalar", scalar=True, **rates)
    return run_ranks(SCRIPT, 1, [place], timeout_seconds=600)[0]


def test_actor_and_critic_learn_in_train_mode_and_activations_are_recomputed(told):
    assert all(all(parts) for parts in told["training"])
    assert told["calls"] == [2, 2]  # of a layer: in the forward, and again in the backward


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_models_own_dropout_is_found(told, role):
    said, name = told[f"noisy_{role}"], {"actor": "reuse_forwards", "critic": "reuse_values"}[role]
    assert f"computes different outputs in train mode, which --{name} uses: its log-probabilities or" in said
    assert f"set --{role}_dropout 0, or remove --{name}" in said and not told["quiet"]
