"""Names and inputs of step 3 are checked before a model loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import SENTENCES, train_tokenizer
from tests.tiny_models import tiny_causal_lm, tiny_config
from training.step3_ppo.algorithm_arguments import AlgorithmArguments
from training.step3_ppo.arguments import PpoArguments, RolesArguments
from training.step3_ppo.assembly import (
    _plan,
    check_lengths,
    check_rollout_dump,
    check_timeouts,
    checked_names,
    chosen_scale,
    closing_sentence,
    load_prompts,
    load_tokenizers,
    summary_of,
)
from training.step3_ppo.evaluation import Evaluation
from training.step3_ppo.reward_arguments import RewardArguments
from training.step3_ppo.rewards import RULES
from training.step3_ppo.rollout.hf import TransformersRollout
from training.step3_ppo.settings import PpoResult
from training.utils.data.arguments import DataArguments
from training.utils.layout.planner import PlanSettings
from training.utils.models.score_scale import ScoreScale, set_score_scale
from training.utils.run.checkpoint_arguments import CheckpointArguments
from training.utils.run.errors import ThreestepError
from training.utils.run.fault_arguments import FaultArguments
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import RunFolder


def names_of(critic: str = "c", reward: str = "model:1.0", *, roles=None, kl=None, **ppo):
    roles = RolesArguments(actor_model_name_or_path="a", critic_model_name_or_path=critic, **(roles or {}))
    algorithm = AlgorithmArguments(advantage=ppo.pop("advantage", "gae"), **(kl or {}))
    flags = PpoArguments(num_samples_per_prompt=2, **ppo)
    return checked_names(roles, flags, algorithm, RewardArguments(reward=reward))


def test_names_stand_for_parts():
    names = names_of(checker="gsm8k", reward="gsm8k,model:0.5")
    assert names.rollout_engine is TransformersRollout and names.checker is RULES["gsm8k"]
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
    wanted = "the reward 'model'" if advantage == "rloo" else "the critic of --advantage gae"
    with pytest.raises(ThreestepError, match=f"--critic_model_name_or_path expects .* name for {wanted}, got nothing"):
        names_of("", reward, advantage=advantage)


def test_a_scale_without_the_reward_model():
    with pytest.raises(ThreestepError, match="--normalize_reward_scores is of the reward model's scores, and --reward"):
        names_of(reward="gsm8k", normalize_reward_scores=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"roles": {"actor_dropout": 0.1}}, "reads and learns in one forward, and --actor_dropout 0.1 would drop"),
        ({"roles": {"critic_dropout": None}}, "in one forward, and --critic_dropout None would drop what"),
        ({"roles": {"lora_dropout": 0.2}}, "in one forward, and --lora_dropout 0.2 would drop what"),
        ({"roles": {"critic_zero_stage": 3}}, "whose weights ZeRO-3 has let go, and --critic_zero_stage is 3; give 2"),
        ({"kl": {"kl_in": "loss", "kl_estimator": "full"}}, "would keep all logits of a rollout for --kl_estimator"),
    ],
)
def test_forwards_that_cannot_be_learned_from(given, said):
    with pytest.raises(ThreestepError, match=f"--reuse_forwards .*{said}"):
        names_of(reuse_forwards=True, **given)
    names_of(**given)
    names_of(reuse_forwards=True, kl={"kl_estimator": "full"})


def test_names_that_nothing_has_are_told_together_with_near_ones():
    with pytest.raises(ThreestepError) as caught:
        names_of(rollout_engine="hff", checker="gsm8", advantage="gea", reward="modle")
    said = str(caught.value)
    assert said.startswith("4 mistakes in the configuration:") and "got 'modle'; did you mean 'model'" in said
    for part in ("--advantage expects one of gae, grpo", "got 'gea'; did you mean 'gae'", "'hff'", "'gsm8k'"):
        assert part in said


def test_tokenizers_that_differ_between_actor_and_reward_model(tmp_path):
    for name, sentences in (("actor", SENTENCES), ("same", SENTENCES), ("other", SENTENCES[:2])):
        train_tokenizer(sentences).save_pretrained(tmp_path / name)
        tiny_config("llama").save_pretrained(tmp_path / name)

    def load(critic: str):
        roles = RolesArguments(
            actor_model_name_or_path=str(tmp_path / "actor"), critic_model_name_or_path=str(tmp_path / critic)
        )
        return load_tokenizers(roles, DataArguments())

    tokenizers = load("same")
    assert tokenizers.actor.get_vocab() == tokenizers.critic.get_vocab()
    roles = RolesArguments(actor_model_name_or_path=str(tmp_path / "actor"))
    assert load_tokenizers(roles, DataArguments(), with_critic=False).critic is None
    with pytest.raises(ThreestepError, match=r"the tokenizers of --actor_model_name_or_path .* differ: the reward"):
        load("other")


def test_the_scale_of_scores_is_read_where_it_is_asked_for(tmp_path):
    roles = RolesArguments(critic_model_name_or_path=str(tmp_path))
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    assert chosen_scale(roles, PpoArguments()) is None
    asked = PpoArguments(normalize_reward_scores=True)
    with pytest.raises(ThreestepError, match="--normalize_reward_scores needs threestep_score_mean and .*with step 2"):
        chosen_scale(roles, asked)
    set_score_scale(config, ScoreScale(1.5, 0.5))
    config.save_pretrained(tmp_path)
    assert chosen_scale(roles, asked) == ScoreScale(1.5, 0.5)
    assert chosen_scale(roles, PpoArguments()) is None


def test_a_warm_up_that_leaves_the_actor_nothing(monkeypatch):
    class Rows(list):
        manifest = {"fingerprint": "rows"}  # noqa: RUF012

    nothing = SimpleNamespace(columns={})
    phase = SimpleNamespace(train=Rows(range(80)), eval=range(4), report=SimpleNamespace(train=nothing, eval=nothing))
    monkeypatch.setattr("training.step3_ppo.assembly.build_phase", lambda *given: phase)
    ppo = PpoArguments(per_device_training_batch_size=8, num_train_epochs=1.0, ppo_epochs=3)  # five rollouts of 16
    ranks = SimpleNamespace(world_size=1, is_main=True)
    tokenizer = SimpleNamespace(eos_token_id=2)

    def load(critic_warmup: int):
        return load_prompts(RunArguments(), DataArguments(), ppo, critic_warmup, tokenizer, ranks, print)

    inputs = load(2)
    assert (inputs.total_rollouts, inputs.optimizer_steps, inputs.warmup_steps) == (5, 5 * 2 * 3, 2 * 2 * 3)
    with pytest.raises(ThreestepError, match="--critic_warmup 5 leaves none of the run's 5 rollouts"):
        load(5)


def test_the_summary():
    result = PpoResult(Evaluation([1.0, 2.0], [0.0, 0.0]), Evaluation([2.0, 5.0], [1.0, 0.0]), seconds=7.0)
    summary = summary_of(result)
    assert (summary["reward_before"], summary["reward_after"]) == (1.5, 3.5)
    assert summary["reward_standard_error"] == pytest.approx(1.0)
    assert (summary["checker_before"], summary["checker_after"]) == (0.0, 0.5)
    assert (summary["held_out_prompts"], summary["seconds"]) == (2, 7.0)
    without = PpoResult(Evaluation([1.0], None), Evaluation([2.0], None), seconds=1.0)
    assert not any("checker" in name for name in summary_of(without))
    after_alone = summary_of(PpoResult(None, Evaluation([2.0, 4.0], [1.0, 0.0]), seconds=1.0))
    assert after_alone == {"reward_after": 3.0, "checker_after": 0.5, "held_out_prompts": 2, "seconds": 1.0}


def test_the_closing_sentence(tmp_path):
    folder = RunFolder(tmp_path, is_main_rank=True)
    whole = {"reward_before": 1.0, "reward_after": 2.5, "reward_standard_error": 0.25, "seconds": 7.4}
    assert closing_sentence(whole, folder, val_only=False) == (
        "step 3: mean reward on held-out prompts 1.000 -> 2.500 (standard error of the gain 0.250) in 7 s; the model "
        f"is in {folder.model}"
    )
    after_alone = {"reward_after": 2.5, "held_out_prompts": 9, "seconds": 7.4}
    assert closing_sentence(after_alone, folder, val_only=False).startswith(
        "step 3: mean reward on held-out prompts 2.500 in 7 s"
    )
    assert closing_sentence(after_alone, folder, val_only=True) == (
        "step 3: mean reward on 9 held-out prompts 2.500; nothing was trained"
    )


@pytest.mark.parametrize(
    ("bound", "packed", "expected"), [(None, False, None), (None, True, 3 * 50), (70, False, 70), (70, True, 70)]
)
def test_a_rank_lays_out_its_own_sequences(bound, packed, expected):
    ppo = PpoArguments(per_device_training_batch_size=3, max_tokens_per_micro_batch=bound)
    plan = _plan(ppo, 50, tiny_causal_lm("llama"), packed, 1)  # hidden size 32
    assert plan == PlanSettings(1, expected, 3, packed, max_row_tokens=50, quadratic_tokens=192.0)


def test_ranks_wait_longer_than_a_reward_function_may_work():
    check_timeouts(FaultArguments(), RewardArguments())
    check_timeouts(FaultArguments(rank_timeout=301), RewardArguments())
    with pytest.raises(
        ThreestepError, match="--reward_timeout 300 expects less than --rank_timeout 300, the seconds that the other"
    ):
        check_timeouts(FaultArguments(rank_timeout=300), RewardArguments())


@pytest.mark.parametrize("short", ["actor", "critic"])
def test_positions_are_compared_before_anything_loads(tmp_path, short):
    for name in ("actor", "critic"):
        tiny_config("llama", max_position_embeddings=64 if name == short else 128).save_pretrained(tmp_path / name)
    roles = RolesArguments(
        actor_model_name_or_path=str(tmp_path / "actor"), critic_model_name_or_path=str(tmp_path / "critic")
    )
    data, ppo = DataArguments(max_prompt_seq_len=60), PpoArguments(max_answer_seq_len=5)
    with pytest.raises(
        ThreestepError,
        match="--max_prompt_seq_len and --max_answer_seq_len together allow sequences of 65 tokens and the model "
        f"'{tmp_path / short}' has 64 positions",
    ):
        check_lengths(roles, data, ppo, with_critic=True)
    if short == "critic":
        check_lengths(roles, data, ppo, with_critic=False)


def test_rollouts_are_not_written_among_those_of_another_run(tmp_path):
    folder = str(tmp_path)
    check_rollout_dump(CheckpointArguments(), PpoArguments(rollout_dump=folder))
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    check_rollout_dump(CheckpointArguments(), PpoArguments())
    check_rollout_dump(CheckpointArguments(resume="latest"), PpoArguments(rollout_dump=folder))
    with pytest.raises(ThreestepError) as told:
        check_rollout_dump(CheckpointArguments(), PpoArguments(rollout_dump=folder))
    assert str(told.value) == (
        f"--rollout_dump expects a folder without rollouts, and {folder} has some; name another, or go on with the run "
        "that wrote them by --resume"
    )
