"""Step 3's parts before and around the loop: inputs, settings, evaluations and reports."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm, tiny_config
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.step3_ppo.flags.arguments import PpoArguments
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.step3_ppo.parts.evaluation import (
    Evaluator,
    HeldOut,
    PpoEvaluation,
    PpoResult,
    closing_sentence,
    evaluation_figures,
    evaluation_line,
    sample_line,
    standard_error_of_gain,
)
from training.step3_ppo.parts.inputs import load_inputs, load_tokenizers, share_style
from training.step3_ppo.parts.reports import Reports, shown
from training.step3_ppo.parts.settings import _plan, wanted_score_scale
from training.step3_ppo.roles.roles import Tokenizers
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.style import SavedStyle, save_style, saved_style
from training.utils.data.rows.arguments import ChatArguments
from training.utils.engine.ranks.startup import Ranks
from training.utils.generation.partners import Partners
from training.utils.layout.planner import PlanSettings
from training.utils.loading.configurations import ScoreScale, set_score_scale
from training.utils.models.row_sharing import RowSharing
from training.utils.run.run_folder import RunFolder
from training.utils.setup.guests import GuestFeatures


def components(rules=()):
    return SimpleNamespace(partners=Partners(), rewards=(), rules=dict(rules))


def test_tokenizers_that_differ_between_actor_and_reward_model(tmp_path):
    for name, sentences in (("actor", SENTENCES), ("same", SENTENCES), ("other", SENTENCES[:2])):
        train_tokenizer(sentences).save_pretrained(tmp_path / name)
        tiny_config("llama").save_pretrained(tmp_path / name)

    def load(critic: str, with_critic: bool = True):
        critic_path = str(tmp_path / critic) if critic else ""
        flags = ppo_flags(actor_model_name_or_path=str(tmp_path / "actor"), critic_model_name_or_path=critic_path)
        return load_tokenizers(flags, with_critic)

    tokenizers = load("same")
    assert tokenizers.actor.get_vocab() == tokenizers.critic.get_vocab()
    assert load("", with_critic=False).critic is None
    with pytest.raises(ThreestepError, match=r"the tokenizers of --actor_model_name_or_path .* differ: the reward"):
        load("other")


def test_flags_that_leave_nothing_to_train_or_to_evaluate(monkeypatch):
    class Rows(list):
        manifest = {"fingerprint": "rows"}  # noqa: RUF012

    nothing = SimpleNamespace(columns={})
    report = SimpleNamespace(train=nothing, eval=nothing)
    phase = SimpleNamespace(train=Rows(range(80)), eval=range(4), report=report, seen=None)
    monkeypatch.setattr("training.step3_ppo.parts.inputs.build_phase", lambda *given, **by_name: phase)
    ranks = SimpleNamespace(world_size=1, is_main=True)
    monkeypatch.setattr("training.step3_ppo.parts.inputs.saved_stop_tokens", lambda *given: [2])
    monkeypatch.setattr("training.step3_ppo.parts.inputs.reader_of_start", lambda *given: {})
    tokenizer = SimpleNamespace(eos_token_id=2, added_tokens_decoder={2: "</s>"})

    def load(critic_warmup: int):
        ppo = {"per_device_training_batch_size": 8, "num_train_epochs": 1.0, "ppo_epochs": 3}  # five rollouts of 16
        return load_inputs(ppo_flags(critic_warmup=critic_warmup, **ppo), components(), tokenizer, ranks)

    with pytest.raises(ThreestepError, match="--val_only evaluates held-out prompts, but there are none; raise"):
        phase.eval = []
        load_inputs(ppo_flags(val_only=True), components(), tokenizer, ranks)
    inputs = load(2)
    assert inputs.rollouts == 5
    with pytest.raises(ThreestepError, match="--critic_warmup 5 leaves none of the run's 5 rollouts"):
        load(5)
    rules = {"mine": lambda prompts, responses, level, **columns: []}
    with pytest.raises(
        ThreestepError, match="^reward function 'mine' expects the column level, but the columns passed"
    ):
        load_inputs(ppo_flags(), components(rules), tokenizer, ranks)


def test_responses_end_at_each_end_token_of_the_model(tmp_path, monkeypatch):
    """The trained one first; of the model's own those that are no ordinary text; the tokenizer's eos."""
    rows = type("Rows", (list,), {"manifest": {"fingerprint": "rows"}})(range(80))
    report = SimpleNamespace(train=SimpleNamespace(columns={}), eval=SimpleNamespace(columns={}))
    phase = SimpleNamespace(train=rows, eval=rows, report=report, seen=None)
    monkeypatch.setattr("training.step3_ppo.parts.inputs.build_phase", lambda *given, **by_name: phase)
    tokenizer = chat_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    letter = tokenizer("a")["input_ids"][0]
    tiny_config("llama").save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[ids("<|im_end|>"), ids("<|eot_id|>"), letter]).save_pretrained(tmp_path)
    said: list[str] = []
    monkeypatch.setattr("training.step3_ppo.parts.inputs.log", lambda line, *_: said.append(line))

    def load(*given):
        flags = ppo_flags(actor_model_name_or_path=str(tmp_path), end_of_conversation_token="<|im_end|>")
        return load_inputs(flags, components(), tokenizer, SimpleNamespace(world_size=1, is_main=True))

    assert load().end_token_ids == tuple(ids(["<|im_end|>", "<|eot_id|>", "<|endoftext|>"]))
    assert said[0].startswith("warning: the model's configuration lists the end tokens 76 ('a'), which the tokenizer")
    assert said[1:] == ["responses end at any of the model's end tokens: <|im_end|>, <|eot_id|>, <|endoftext|>"]
    (tmp_path / "generation_config.json").unlink()  # the configuration's then
    assert tokenizer.added_tokens_decoder[2].special
    assert load().end_token_ids == (ids("<|im_end|>"), 2, ids("<|endoftext|>"))


@pytest.mark.parametrize("style, warns", [(None, False), ("chat_template", False), ("human_assistant", True)])
def test_a_reward_model_trained_in_another_style_is_named(capsys, style, warns):
    tokenizers = Tokenizers(*(chat_tokenizer(chat_template("chatml")) for _ in range(2)))
    save_style(tokenizers.actor, SavedStyle("chat_template"))
    if style is not None:
        save_style(tokenizers.critic, SavedStyle(style))
    ranks = SimpleNamespace(is_main=True)
    assert share_style(tokenizers, ChatArguments(), ranks) == "chat_template"
    others = capsys.readouterr().out.splitlines()
    assert len(others) == warns and all(
        "was trained with a different prompt style (human_assistant)" in o for o in others
    )
    assert saved_style(tokenizers.critic) == SavedStyle("chat_template")  # what it learns in this run


@pytest.mark.parametrize(
    ("bound", "packed", "expected"), [(None, False, None), (None, True, 3 * 50), (70, False, 70), (70, True, 70)]
)
def test_a_rank_lays_out_its_own_sequences(bound, packed, expected):
    ppo = PpoArguments(per_device_training_batch_size=3, max_tokens_per_micro_batch=bound, share_beginnings=9)
    flags: Any = SimpleNamespace(ppo=ppo, longest_tokens=50, guests=GuestFeatures())
    plan = _plan(flags, tiny_causal_lm("llama"), packed, Ranks(0, 0, 1, torch.device("cpu")))  # hidden size 32
    assert plan == PlanSettings(
        1, expected, 3, packed, max_row_tokens=50, quadratic_tokens=192.0, least_shared_tokens=9
    )


@pytest.mark.parametrize(
    ("device", "reuses", "shared_by", "most"),
    [("cpu", False, 1, 2048), ("cpu", True, 1, 2048), ("cuda", False, 1, 3000), ("cpu", False, 2, 3000)],
)
def test_forwards_on_a_cpu_are_small_but_where_rows_are_shared(device, reuses, shared_by, most):
    """60 sequences of 50 tokens are 3,000."""
    ppo = PpoArguments(per_device_training_batch_size=60, reuse_forwards=reuses)
    flags: Any = SimpleNamespace(ppo=ppo, longest_tokens=50, guests=GuestFeatures())
    ranks = Ranks(0, 0, 1, torch.device(device), sharing=RowSharing(shared_by))
    plan = _plan(flags, tiny_causal_lm("llama"), True, ranks)
    assert plan.max_tokens_per_micro_batch == most


def test_the_scale_of_scores_is_read_where_it_is_asked_for(tmp_path):
    roles = RolesArguments(critic_model_name_or_path=str(tmp_path))
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    assert wanted_score_scale(roles, PpoArguments()) is None
    asked = PpoArguments(normalize_reward_scores=True)
    with pytest.raises(ThreestepError, match="--normalize_reward_scores needs threestep_score_mean and .*with step 2"):
        wanted_score_scale(roles, asked)
    set_score_scale(config, ScoreScale(1.5, 0.5))
    config.save_pretrained(tmp_path)
    assert wanted_score_scale(roles, asked) == ScoreScale(1.5, 0.5)
    assert wanted_score_scale(roles, PpoArguments()) is None


def sample(source: str, reward: float, **more) -> dict:
    columns = {"data_source": source}
    return {
        "prompt_index": 0,
        "response": "r",
        "reward": reward,
        "response_tokens": 4,
        "ended": True,
        "columns": columns,
        "prompt": "p",
        **more,
    }


def test_means_over_all_prompts_and_of_each_source():
    samples = [
        sample("jsonl:/data/a.jsonl", 1.0, check=0.0),
        sample("openai/gsm8k", 2.0, prompt_index=1),
        sample("openai/gsm8k", 6.0, prompt_index=2),
    ]
    assert evaluation_figures(samples, "eval", 0) == {
        "eval/reward": 3.0, "eval/response_tokens": 4.0, "eval/ended_share": 1.0, "eval/check": 0.0,
        "eval_a.jsonl/reward": 1.0, "eval_a.jsonl/response_tokens": 4.0, "eval_a.jsonl/ended_share": 1.0,
        "eval_a.jsonl/check": 0.0,
        "eval_gsm8k/reward": 4.0, "eval_gsm8k/response_tokens": 4.0, "eval_gsm8k/ended_share": 1.0,
    }  # fmt: skip
    assert all(name.startswith("eval/") for name in evaluation_figures(samples[1:], "eval", 0))  # one source


def test_sources_that_end_alike_keep_their_whole_names():
    found = evaluation_figures(
        [sample("jsonl:/a/x.jsonl", 1.0), sample("jsonl:/b/x.jsonl", 2.0, prompt_index=1)], "eval", 0
    )
    assert found["eval_jsonl__a_x.jsonl/reward"] == 1.0 and found["eval_jsonl__b_x.jsonl/reward"] == 2.0


def test_several_samples_of_a_prompt():
    """Rewards 1, 3 and 2, 2; the rule gives an answer to the first prompt's responses, by which both are one vote."""
    scores = [(0, 1.0, "a", 7.0), (0, 3.0, "b", 7.0), (1, 2.0, "c", 1.0), (1, 2.0, " c ", 2.0)]
    samples = [
        sample(
            "one", reward, prompt_index=index, response=text, **{"reward/rule": reward, "reward/rule/answer": answer}
        )
        for index, reward, text, answer in scores
    ]
    found = evaluation_figures(samples, "eval", 0)
    assert found["eval/reward"] == found["eval/reward/rule"] == 2.0
    assert (found["eval/reward_best@2"], found["eval/reward_worst@2"], found["eval/reward_std@2"]) == (2.5, 1.5, 0.5)
    assert found["eval/reward/rule_majority@2"] == 2.0  # the mean of 1 and 3, and of 2 and 2
    assert found["eval/reward_mean@2_low"] <= 2.0 <= found["eval/reward_mean@2_high"]
    # A value that a prompt's responses do not all have leaves that prompt out.
    some = [dict(each) for each in samples]
    del some[3]["reward/rule"]
    assert evaluation_figures(some, "eval", 0)["eval/reward/rule_best@2"] == 3.0


def test_an_evaluation_in_one_line():
    figures = {"eval/reward": 0.5, "eval/response_tokens": 12.25, "eval/ended_share": 0.75, "eval/check": 0.125}
    assert evaluation_line(0, figures) == (
        "evaluation before training: reward 0.500, checker 0.125, 12.2 tokens a response, 25% cut at the length limit"
    )
    del figures["eval/check"]
    assert evaluation_line(1200, {**figures, "eval/ended_share": 1.0}) == (
        "evaluation after rollout 1,200: reward 0.500, 12.2 tokens a response"
    )


def test_a_sample_in_one_line():
    line = {"step": 3, "prompt": "Human: 1 +\n 1? Assistant:", "response": " 2\n", "reward": 0.5}
    assert sample_line(line) == "after rollout 3: Human: 1 + 1? Assistant: -> 2 (reward 0.500)"
    assert sample_line(line, characters=5) == "after rollout 3: ...tant: -> 2 (reward 0.500)"
    assert sample_line({**line, "response": "abcdefgh"}, 5).endswith("-> abcde... (reward 0.500)")


def test_the_summary():
    result = PpoResult(PpoEvaluation([1.0, 2.0], [0.0, 0.0]), PpoEvaluation([2.0, 5.0], [1.0, 0.0]), seconds=7.0)
    summary = result.summary()
    assert (summary["reward_before"], summary["reward_after"]) == (1.5, 3.5)
    assert summary["reward_standard_error"] == pytest.approx(1.0)
    assert (summary["checker_before"], summary["checker_after"]) == (0.0, 0.5)
    assert (summary["held_out_prompts"], summary["seconds"]) == (2, 7.0)
    without = PpoResult(PpoEvaluation([1.0], None), PpoEvaluation([2.0], None), seconds=1.0)
    assert not any("checker" in name for name in without.summary())
    after_alone = PpoResult(None, PpoEvaluation([2.0, 4.0], [1.0, 0.0]), seconds=1.0).summary()
    assert after_alone == {"reward_after": 3.0, "checker_after": 0.5, "held_out_prompts": 2, "seconds": 1.0}


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path):
    nothing = dict.fromkeys(("roles", "rollout_engine", "tokenizer", "checker", "settings", "metrics", "folder"))
    assert Evaluator(**nothing, held_out=HeldOut([], 4)).evaluate(0) is None
    summary = PpoResult(None, None, seconds=7.4).summary()
    assert summary == {"held_out_prompts": 0, "seconds": 7.4}
    folder = RunFolder(tmp_path, is_main_rank=True)
    assert closing_sentence(summary, folder, val_only=False) == (
        f"step 3: trained in 7 s, without an evaluation; the model is in {folder.model}"
    )


def test_the_closing_sentence(tmp_path):
    folder = RunFolder(tmp_path, is_main_rank=True)
    whole = {"reward_before": 1.0, "reward_after": 2.5, "reward_standard_error": 0.25, "held_out_prompts": 9,
             "seconds": 7.4}  # fmt: skip
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


def test_the_standard_error_by_hand():
    # Gains 1, 3, 2, 2: mean 2, variance (1 + 1) / 3, over 4 prompts: sqrt(2/3 / 4).
    assert standard_error_of_gain([0, 1, 5, 2], [1, 4, 7, 4]) == pytest.approx((2 / 3 / 4) ** 0.5)


def test_prompts_are_paired():
    """Prompts that differ among themselves by far more than the gain leave its error small."""
    before = [float(index * 10) for index in range(20)]
    after = [value + 1 + 0.1 * (index % 2) for index, value in enumerate(before)]
    gains = [new - old for old, new in zip(before, after, strict=True)]
    assert standard_error_of_gain(before, after) == pytest.approx(statistics.stdev(gains) / 20**0.5)
    assert standard_error_of_gain(before, after) < 0.02


def test_one_prompt_and_equal_gains():
    assert standard_error_of_gain([1.0], [2.0]) == 0.0
    assert standard_error_of_gain([1.0, 2.0], [2.0, 3.0]) == 0.0


def test_evaluations_of_different_prompts_do_not_meet():
    with pytest.raises(ValueError):
        standard_error_of_gain([1.0, 2.0], [1.0])


def made_reports() -> Reports:
    sampling = SimpleNamespace(max_new_tokens=4)
    roles = SimpleNamespace(actor=SimpleNamespace(ranks=SimpleNamespace(is_main=True)))
    return Reports(roles, SimpleNamespace(drawing=SimpleNamespace(sampling=sampling)), None)


def test_many_cut_responses_are_said_once_with_their_share(capsys):
    reports = made_reports()
    for iteration, cut_share in enumerate((0.04, 0.25, 0.5), start=1):
        reports.warn_of_cut({"rollout/ended_share": 1 - cut_share}, iteration)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "warning: 25% of the responses in rollout 2 were cut off at --max_answer_seq_len 4 tokens before"
    )
    made_reports().warn_of_cut({"rollout/ended_share": 0.5, "conversation/turns": 2.0}, 1)
    assert "were cut off at a conversation limit (conversation/cut_by_... in metrics.jsonl shows which) before" in (
        capsys.readouterr().out
    )


def test_the_progress_shows_what_a_rollout_has():
    figures = {"rollout/score": 0.5, "rollout/ended_share": 0.75, "train/tokens_per_second": 1200.4}
    rates = {"critic/learning_rate": 2e-5}
    assert [str(figure) for figure in shown({**figures, **rates})] == [
        "score 0.500", "cut at the length limit 25%", "learning rate 2.00e-05", "1,200 tok/s"
    ]  # fmt: skip
    whole = {**figures, **rates, "rollout/ended_share": 1.0, "rollout/kl": 0.125, "actor/learning_rate": 1e-5}
    assert [str(figure) for figure in shown(whole)][1:3] == ["KL 0.125", "learning rate 1.00e-05"]
