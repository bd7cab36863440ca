"""Names and flags of step 3 are checked before a model loads; what keeps --reuse_forwards and --reuse_values auto from
reuse, by the flags alone; the correction of a run's rollouts, where a plugin has one and where none does."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_config
from training.step3_ppo.contracts.records import NO_CORRECTION, Corrected
from training.step3_ppo.flags import rollout_choices
from training.step3_ppo.flags.checks import FORWARDS, VALUES, check_models, checked_components, why_apart
from training.step3_ppo.flags.rollout_choices import correction_of
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.rewards.rules import gsm8k_reward


def names_of(critic: str = "c", reward: str = "model:1.0", *, roles=None, kl=None, **ppo):
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": critic}
    flags = ppo_flags(**paths, reward=reward, num_samples_per_prompt=2, **(roles or {}), **(kl or {}), **ppo)
    return checked_components(flags)


def test_names_stand_for_parts():
    names = names_of(checker="gsm8k", reward="gsm8k,model:0.5")
    assert names.rollout_engine is TransformersRollout and names.checker is gsm8k_reward
    assert [(reward.name, reward.weight) for reward in names.rewards] == [("gsm8k", 1.0), ("model", 0.5)]
    assert names_of().checker is None


@pytest.mark.parametrize(
    ("reward", "advantage", "with_model", "with_tokenizer"),
    [("model", "gae", True, True), ("gsm8k", "gae", False, True), ("model", "rloo", True, True),
     ("gsm8k", "rloo", False, False)],
)  # fmt: skip
def test_what_starts_from_the_critics_path(reward, advantage, with_model, with_tokenizer):
    names = names_of(reward=reward, advantage=advantage)
    assert (names.with_reward_model, names.with_critic_tokenizer) == (with_model, with_tokenizer)
    if not with_tokenizer:
        names_of("", reward, advantage=advantage)
        return
    wanted = "^--advantage gae needs a critic, but --critic_model_name_or_path is not set; set it to step 2's"
    if with_model:
        wanted = r"^no reward is set; set --reward .*\(gsm8k, .*\), or set --critic_model_name_or_path to .* hub name\)"
        wanted += ", from which the critic of --advantage gae also starts$" if advantage == "gae" else "$"
    with pytest.raises(ThreestepError, match=wanted):
        names_of("", reward, advantage=advantage)


def test_a_scale_without_the_reward_model():
    with pytest.raises(
        ThreestepError, match="--normalize_reward_scores needs a reward model, but --reward uses none; remove"
    ):
        names_of(reward="gsm8k", normalize_reward_scores=True)


OF_LOGITS = {"kl_in": "loss", "kl_estimator": "full"}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "forwards",
            {"roles": {"actor_dropout": 0.1}},
            "reads and learns in one forward, but --actor_dropout 0.1 would",
        ),
        ("values", {"roles": {"critic_dropout": 0.3}}, "in one forward, but --critic_dropout 0.3 would change the"),
        (
            "forwards",
            {"roles": {"actor_zero_stage": 3}},
            "keeps forwards, but --actor_zero_stage 3 releases their weights; use",
        ),
        ("values", {"advantage": "reinforce++"}, "needs a critic, but --advantage .* has none"),
        ("forwards", {"kl": OF_LOGITS}, "would keep all logits of a rollout for --kl_e"),
    ],
)
def test_forwards_that_cannot_be_learned_from(name, given, said):
    with pytest.raises(ThreestepError, match=f"--reuse_{name} .*{said}"):
        names_of(**{f"reuse_{name}": True}, **given)
    names_of(**given)
    both = {"reuse_forwards": True, "reuse_values": True}
    names_of(**both, kl={"kl_estimator": "full"})
    names_of(**both, roles={"actor_dropout": None, "critic_dropout": None})  # the models themselves are asked


def test_names_that_nothing_has_are_told_together_with_near_ones():
    with pytest.raises(ThreestepError) as caught:
        names_of(rollout_engine="hff", checker="gsm8", advantage="gea", reward="modle")
    said = str(caught.value)
    assert said.startswith("4 mistakes in the configuration:") and "got 'modle'; did you mean 'model'" in said
    for part in ("--advantage expects one of gae, grpo", "got 'gea'; did you mean 'gae'", "'hff'", "'gsm8k'"):
        assert part in said


def test_ranks_wait_longer_than_a_reward_function_may_work():
    names_of()
    names_of(rank_timeout=301)
    with pytest.raises(
        ThreestepError, match="--reward_timeout 300 must be less than --rank_timeout 300, the time ranks wait"
    ):
        names_of(rank_timeout=300)


@pytest.mark.parametrize("short", ["actor", "critic"])
def test_positions_are_compared_before_anything_loads(tmp_path, short):
    for name in ("actor", "critic"):
        tiny_config("llama", max_position_embeddings=64 if name == short else 128).save_pretrained(tmp_path / name)
    paths = {f"{name}_model_name_or_path": str(tmp_path / name) for name in ("actor", "critic")}
    flags = ppo_flags(**paths, max_prompt_seq_len=60, max_answer_seq_len=5)
    with pytest.raises(
        ThreestepError,
        match="sequences may have 65 tokens .--max_prompt_seq_len and --max_answer_seq_len together., but the model "
        f"'{tmp_path / short}' has only 64 positions",
    ):
        check_models(flags, with_critic=True)
    if short == "critic":
        check_models(flags, with_critic=False)


_PAIRS = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 32}  # one step a rollout
_GRPO = {"advantage": "grpo", "kl_in": "loss", **_PAIRS}


def why(name: str, **given) -> str | None:
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    flags = ppo_flags(**{**paths, "reward": "model:1.0", **given})
    return why_apart(name, flags, checked_components(flags).algorithm)


DROPOUT = "true reads and learns in one forward, but"
NONE_READ = "there is no earlier forward to learn from"


@pytest.mark.parametrize(
    ("names", "given", "said"),
    [
        ((FORWARDS, VALUES), {}, None),
        ((FORWARDS,), {"advantage": "rloo", **_PAIRS}, None),
        ((FORWARDS,), {"critic_zero_stage": 3, "critic_dropout": 0.1}, None),
        ((VALUES,), {"kl_coef": 0.0}, None),
        ((VALUES,), {"actor_zero_stage": 3, "critic_zero_stage": 3, "actor_dropout": 0.1}, None),
        ((FORWARDS, VALUES), {"ppo_epochs": 2}, "a rollout has 2 optimizer steps"),
        ((FORWARDS, VALUES), {"per_device_training_batch_size": 8}, "a rollout has 2 optimizer steps"),
        (
            (FORWARDS, VALUES), {"generation_batches": 2, "per_device_training_batch_size": 32},
            "a step learns from 2 rollouts",
        ),
        ((FORWARDS, VALUES), {"val_only": True}, "nothing is trained"),
        ((FORWARDS,), {"actor_dropout": 0.1}, f"{DROPOUT} --actor_dropout 0.1 would change"),
        ((FORWARDS,), {"actor_zero_stage": 3}, "true keeps forwards, but --actor_zero_stage 3 releases their weights"),
        ((FORWARDS,), {"kl_coef": 0.0}, NONE_READ),
        ((FORWARDS,), _GRPO, NONE_READ),
        ((FORWARDS,), {**_GRPO, "kl_coef": 0.0}, NONE_READ),
        ((VALUES,), {"critic_dropout": 0.1}, f"{DROPOUT} --critic_dropout 0.1 would"),
        ((VALUES,), _GRPO, "there is no critic"),
    ],
)  # fmt: skip
def test_what_keeps_a_forward_apart(names, given, said):
    for name in names:
        found = why(name, **given)
        assert found is None if said is None else (found or "").startswith(said), name


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
def test_a_plugin_that_needs_forwards_of_its_own(name, monkeypatch):
    monkeypatch.setattr("training.step3_ppo.flags.checks.own_forwards", lambda flags: ["steps are watched", "others"])
    assert why(name) == "steps are watched"


def test_returns_that_may_need_other_responses(tmp_path):
    """A user's estimator with a critic says nothing of whose values its returns read."""
    path = tmp_path / "own.py"
    path.write_text(
        "from training.step3_ppo.advantages import ESTIMATORS, Estimator\n"
        "mine = Estimator(ESTIMATORS['gae'].estimate, needs_critic=True)\n"
        "alone = Estimator(ESTIMATORS['gae'].estimate, needs_critic=True, returns_alone=True)\n"
    )
    said = why(VALUES, advantage=f"{path}:mine") or ""
    assert said.startswith(
        "true needs returns that follow from a response's own rewards and values, but --advantage"
    ), said
    assert why(VALUES, advantage=f"{path}:alone") is None and why(FORWARDS, advantage=f"{path}:mine") is None


def test_without_a_plugin_the_newest_weights_have_to_draw(monkeypatch):
    monkeypatch.setattr(rollout_choices, "added", lambda table, known: {})
    assert correction_of(ppo_flags()) is NO_CORRECTION
    monkeypatch.setattr(rollout_choices, "draws_exactly", lambda flags: False)
    with pytest.raises(ThreestepError, match="no installed plugin has one; generate with --rollout_engine hf"):
        correction_of(ppo_flags())


def test_two_plugins_that_correct_are_refused(monkeypatch):
    monkeypatch.setattr(rollout_choices, "added", lambda table, known: {"one": "a:b", "two": "c:d"})
    with pytest.raises(ThreestepError, match="corrected only once, but --one and --two each correct them"):
        correction_of(ppo_flags())


def test_no_correction_leaves_everything_as_it_is():
    assert NO_CORRECTION.corrected(None, None, None) == Corrected(None, None)  # type: ignore[arg-type]
    assert NO_CORRECTION.loss_weights(None, None) is None  # type: ignore[arg-type]
    assert NO_CORRECTION.measures(None, None, Corrected()) == [] and NO_CORRECTION.figures({"a": 1.0}) == {}  # type: ignore[arg-type]
    assert not NO_CORRECTION.bypasses and not NO_CORRECTION.reads_old_policy
