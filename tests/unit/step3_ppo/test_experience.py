"""Rollouts and models become an Experience: each part against its own naive computation."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from training.step3_ppo.advantages.gae import gae
from training.step3_ppo.experience import ExperienceSettings, laid_out, make_experience, score, sequences_of
from training.step3_ppo.records import Rollout
from training.utils.layout.planner import PlanSettings
from training.utils.models.score_scale import ScoreScale
from training.utils.models.token_model import PolicyModel, ScalarModel

PAD = EOS = 2  # pad is eos: every mask has to come from lengths
PROMPTS = [4, 2, 7, 1, 3]
RESPONSES = [3, 1, 5, 6, 2]


@pytest.fixture(scope="module")
def roles() -> SimpleNamespace:
    """Four small models that differ, in place of the engines; `reading` notes that it was entered."""
    state = SimpleNamespace(
        actor=PolicyModel(tiny_causal_lm("llama", seed=1)),
        reference=PolicyModel(tiny_causal_lm("llama", seed=2)),
        critic=ScalarModel(tiny_scalar_model("llama", seed=3)),
        reward_model=ScalarModel(tiny_scalar_model("llama", seed=4)),
        entered=0,
    )

    @contextlib.contextmanager
    def reading():
        state.entered += 1
        yield

    state.reading = reading
    return state


@pytest.fixture
def rollout() -> Rollout:
    generator = torch.Generator().manual_seed(0)
    count, prompt_width, width = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    prompt_ids_BP = torch.full((count, prompt_width), PAD)
    prompt_mask_BP = torch.zeros(count, prompt_width, dtype=torch.bool)
    response_ids_BR = torch.full((count, width), PAD)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        prompt_ids_BP[row, prompt_width - prompt :] = torch.randint(3, VOCABULARY, (prompt,), generator=generator)
        prompt_mask_BP[row, prompt_width - prompt :] = True
        response_ids_BR[row, :response] = torch.randint(3, VOCABULARY, (response,), generator=generator)
        response_ids_BR[row, response - 1] = EOS
    lengths_B = torch.tensor(RESPONSES)
    ended_B = torch.ones(count, dtype=torch.bool)
    return Rollout(prompt_ids_BP, prompt_mask_BP, response_ids_BR, lengths_B, torch.zeros(count, width), ended_B)


def how(**changes) -> ExperienceSettings:
    given = {
        "temperature": 0.8, "score_scale": None, "clip_reward": 100.0, "kl_coef": 0.1, "advantage": "gae", "gamma": 0.9,
        "lam": 0.7,
        "whiten_advantages": False, "plan": PlanSettings(1, max_rows_per_micro_batch=2), "pad_token_id": PAD,
    }  # fmt: skip
    return ExperienceSettings(**{**given, **changes})


def one_by_one(rollout: Rollout, roles) -> dict[str, torch.Tensor]:
    """Each sequence alone, through the plain models' own forward."""
    found: dict[str, list[torch.Tensor]] = {"old": [], "ref": [], "values": [], "scores": []}
    with torch.no_grad():
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            ids = torch.cat([rollout.prompt_of(row), rollout.response_of(row)])[None]
            chosen = ids[0, prompt:, None]
            for name, policy in (("old", roles.actor), ("ref", roles.reference)):
                logits = policy.model(ids, use_cache=False).logits[0, prompt - 1 : -1] / 0.8
                found[name].append(torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0])
            hidden = roles.critic.model.model(ids, use_cache=False)[0][0, prompt - 1 : -1]
            found["values"].append(roles.critic.model.score(hidden)[:, 0])
            hidden = roles.reward_model.model.model(ids, use_cache=False)[0][0, -1]
            found["scores"].append(roles.reward_model.model.score(hidden))
            assert len(chosen) == response
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        for name, parts in found.items()
        if name != "scores"
    }
    return {**padded, "scores": torch.cat(found["scores"])}


@pytest.mark.parametrize(
    "plan",
    [
        PlanSettings(1, None, 1),
        PlanSettings(1, None, 2),
        PlanSettings(1, None, 8),
        PlanSettings(1, 16, 8),
        PlanSettings(1, packed=True, max_row_tokens=13),
        PlanSettings(1, 26, packed=True, max_row_tokens=13),
        PlanSettings(1, packed=True, max_row_tokens=100, quadratic_tokens=1e9),  # one long row
    ],
)
def test_every_field_is_what_the_models_say_of_each_sequence_alone(rollout, roles, plan):
    entered = roles.entered
    made = make_experience(rollout, roles, how(plan=plan))
    expected = one_by_one(rollout, roles)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(made.scores_B, expected["scores"], **close)
    torch.testing.assert_close(made.old_logprobs_BR, expected["old"], **close)
    torch.testing.assert_close(made.ref_logprobs_BR, expected["ref"], **close)
    torch.testing.assert_close(made.values_BR, expected["values"], **close)
    rewards_BR = -0.1 * (expected["old"] - expected["ref"])
    for row, length in enumerate(RESPONSES):
        rewards_BR[row, length - 1] += expected["scores"][row]
    torch.testing.assert_close(made.rewards_BR, rewards_BR, **close)
    advantages_BR, returns_BR = gae(rewards_BR, expected["values"], rollout.response_lengths_B, 0.9, 0.7)
    torch.testing.assert_close(made.advantages_BR, advantages_BR, **close)
    torch.testing.assert_close(made.returns_BR, returns_BR, **close)
    assert made.rollout is rollout and roles.entered == entered + 1
    outside_BR = ~rollout.response_mask_BR
    for name in ("old_logprobs_BR", "ref_logprobs_BR", "values_BR", "rewards_BR", "advantages_BR", "returns_BR"):
        field = getattr(made, name)
        assert field.dtype == torch.float32 and not field.requires_grad
        assert not field[outside_BR].any()


def test_whitening_touches_the_advantages_alone(rollout, roles):
    plain, white = make_experience(rollout, roles, how()), make_experience(rollout, roles, how(whiten_advantages=True))
    inside = white.advantages_BR[rollout.response_mask_BR]
    assert inside.mean().item() == pytest.approx(0, abs=1e-5) and inside.std().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(plain.returns_BR, white.returns_BR)
    assert torch.equal(plain.rewards_BR, white.rewards_BR)


def test_scores_are_clipped(rollout, roles):
    free = score(rollout, roles, how()).detach()
    bound = float(free.abs().median())
    clipped = score(rollout, roles, how(clip_reward=bound)).detach()
    torch.testing.assert_close(clipped, free.clamp(-bound, bound))
    assert not torch.equal(clipped, free)


def test_scores_are_put_on_a_scale_before_the_clip(rollout, roles):
    free = score(rollout, roles, how()).detach()
    scale = ScoreScale(mean=float(free.mean()), std=0.5)
    scaled = score(rollout, roles, how(score_scale=scale)).detach()
    torch.testing.assert_close(scaled, (free - free.mean()) * 2)
    bound = float(scaled.abs().median())
    clipped = score(rollout, roles, how(score_scale=scale, clip_reward=bound)).detach()
    torch.testing.assert_close(clipped, scaled.clamp(-bound, bound))


def test_the_score_is_read_at_the_end_token(rollout, roles):
    """Another end token is another score: the token that ends the response is what the model reads."""
    other_ids_BR = rollout.response_ids_BR.clone()
    for row, length in enumerate(RESPONSES):
        other_ids_BR[row, length - 1] = 17
    other = Rollout(**{**vars_of(rollout), "response_ids_BR": other_ids_BR})
    assert (score(rollout, roles, how()) - score(other, roles, how())).abs().min() > 1e-3
    longer = Rollout(
        **{**vars_of(rollout), "response_ids_BR": torch.nn.functional.pad(rollout.response_ids_BR, (0, 4), value=PAD)}
    )
    torch.testing.assert_close(score(longer, roles, how()), score(rollout, roles, how()))


def vars_of(rollout: Rollout) -> dict:
    names = (
        "prompt_ids_BP",
        "prompt_mask_BP",
        "response_ids_BR",
        "response_lengths_B",
        "sampled_logprobs_BR",
        "ended_B",
    )
    return {name: getattr(rollout, name) for name in names}


def test_sequences_are_prompt_and_response_without_padding(rollout):
    for row, sequence in enumerate(sequences_of(rollout)):
        assert len(sequence) == PROMPTS[row] + RESPONSES[row]
        assert sequence.is_target.sum() == RESPONSES[row]
        assert sequence.input_ids[-1] == EOS and sequence.is_target[-1]


def test_a_rank_with_fewer_micro_batches_gets_rows_of_padding(rollout, monkeypatch):
    """Another rank has seven: this one goes along, with rows that carry nothing."""
    monkeypatch.setattr("training.step3_ppo.experience.largest", lambda number, _device: 7)
    laid = laid_out(sequences_of(rollout), PlanSettings(1, max_rows_per_micro_batch=2), PAD, torch.device("cpu"))
    assert len(laid) == 7
    assert sorted(index for chosen, _ in laid for index in chosen) == [0, 1, 2, 3, 4]
    assert [len(chosen) for chosen, _ in laid] == [2, 2, 1, 0, 0, 0, 0]
    assert all(rows.target_ids_M.numel() == 0 for chosen, rows in laid if not chosen)


def test_rows_of_padding_change_nothing(rollout, roles, monkeypatch):
    expected = make_experience(rollout, roles, how(whiten_advantages=True))
    monkeypatch.setattr("training.step3_ppo.experience.largest", lambda number, _device: 7)
    made = make_experience(rollout, roles, how(whiten_advantages=True))
    assert torch.equal(made.advantages_BR, expected.advantages_BR)
    assert torch.equal(made.scores_B, expected.scores_B)
