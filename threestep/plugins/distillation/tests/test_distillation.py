"""A teacher: its flags beside the others of a step, what it adds to the loss, and what is refused at the start."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.one_model_flags import one_model_flags
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm, tiny_config
from threestep.plugins.distillation import opening
from threestep.plugins.distillation.arguments import SftTeacherArguments, TeacherArguments
from threestep.plugins.distillation.checks import check_beside_teacher, step_needs
from threestep.plugins.distillation.feature import TeacherFeature, teacher_of
from threestep.plugins.distillation.guest import LiveDistillation
from threestep.plugins.distillation.head_loss import HeadComparison
from threestep.plugins.distillation.opening import check_same_words, engine_settings, open_teacher
from threestep.plugins.distillation.planned import plan_teacher
from threestep.plugins.distillation.settings import DivergenceSettings, TeacherSettings, check_teacher
from training.step1_sft import STEP
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.contracts.documents import TokenSequence, plain
from training.utils.engine.config.arguments import EngineSettings
from training.utils.loading.models import load_causal_lm
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel
from training.utils.plugins.plugin import StepNeeds

TOP = DivergenceSettings("js", 0.1, 5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (TeacherSettings(compared=DivergenceSettings(top_k=5)), "--teacher_top_k 5 needs a teacher, but none is"),
        (TeacherSettings(zero_stage=3), "--teacher_zero_stage 3 needs a teacher, but none is given; pass"),
        (
            TeacherSettings("t", compared=DivergenceSettings(beta=0.1)),
            "--teacher_beta 0.1 applies only to --teacher_divergence",
        ),
        (TeacherSettings(url="http://a/v1"), "--teacher_url returns only a teacher's most likely tokens; set"),
        (TeacherSettings("t", url="http://a/v1"), "--teacher_url http://a/v1 names a server, but"),
        (
            TeacherSettings("t", "f.jsonl"),
            "--distill f.jsonl stores a teacher's most likely tokens; set --teacher_top_k",
        ),
        (TeacherSettings(file="f.jsonl", compared=TOP), "--teacher_top_k 5 is for a teacher that is loaded or served"),
    ],
)
def test_what_does_not_go_together(settings: TeacherSettings, why: str):
    mistakes = Mistakes()
    check_teacher(mistakes, settings)
    with pytest.raises(ThreestepError, match=why):
        mistakes.raise_if_any()


def test_a_teacher_and_none():
    mistakes = Mistakes()
    check_teacher(mistakes, TeacherSettings())
    check_teacher(mistakes, TeacherSettings("t", "f.parquet", None, TOP, 2.0, 3, offload=True))
    check_teacher(mistakes, TeacherSettings(file="f.jsonl"))
    check_teacher(mistakes, TeacherSettings(url="http://a/v1", compared=TOP))
    mistakes.raise_if_any()
    given = (TeacherSettings("t"), TeacherSettings(file="f"), TeacherSettings(url="u"))
    assert [each.flag for each in given] == ["--teacher_model_name_or_path", "--distill", "--teacher_url"]
    assert all(each.is_there for each in given) and not TeacherSettings().is_there


def test_settings_of_flags():
    flags = TeacherArguments("t", None, "js", 0.2, 7, 0.5, 3, teacher_offload=True)
    compared = DivergenceSettings("js", 0.2, 7)
    assert flags.settings() == TeacherSettings("t", None, None, compared, 0.5, 3, offload=True)
    assert TeacherArguments().settings() == TeacherSettings() == SftTeacherArguments().settings()
    assert SftTeacherArguments(distill="f.jsonl").settings() == TeacherSettings(file="f.jsonl")
    assert {field.name for field in fields(TeacherArguments)} <= {field.name for field in fields(SftTeacherArguments)}


ALONE = {"actor_model_name_or_path": "a", "advantage": "none", "kl_coef": 0.0}
TAUGHT = {**ALONE, "teacher_model_name_or_path": "t"}


def test_a_teacher_alone_needs_no_reward():
    components = checked_components(ppo_flags(**ALONE, teacher_model_name_or_path="t"))
    assert components.rewards == () and not components.with_critic_tokenizer
    assert not components.algorithm.estimator.needs_critic and not components.algorithm.wants_reference
    beside = {"teacher_model_name_or_path": "t", "reward": "gsm8k", "advantage": "reinforce++"}
    flags = ppo_flags(actor_model_name_or_path="a", **beside)
    assert [reward.name for reward in checked_components(flags).rewards] == ["gsm8k"]
    settings = teacher_of(flags).settings
    assert settings.name_or_path == "t" and settings.longest_tokens == flags.longest_tokens


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            ALONE,
            (
                "--advantage none trains the actor only on a teacher's output, but there is no teacher; set "
                "--teacher_model_name_or_path"
            ),
        ),
        ({**TAUGHT, "kl_coef": 0.1}, "--kl_coef 0.1 in the reward has no effect with"),
        (
            {**TAUGHT, "mask_truncated_responses": True},
            "--mask_truncated_responses leaves responses out of the loss, but",
        ),
        (
            {**TAUGHT, "parallel_thinking": True},
            "--parallel_thinking inserts tags that the teacher was not trained on;",
        ),
    ],
)
def test_beside_other_flags_of_step_3(given, why):
    with pytest.raises(ThreestepError, match=why):
        checked_components(ppo_flags(**given))


@pytest.mark.parametrize(
    ("in_rollouts", "why"),
    [
        (False, "--distill names a teacher that reads only text, but rows of the data have media; remove it"),
        (
            True,
            "--distill does not work with prompts that have images, because the teacher reads only text; remove it",
        ),
    ],
)
def test_a_teacher_reads_texts_alone(in_rollouts, why):
    teacher, none = TeacherFeature(TeacherSettings(file="t.jsonl"), in_rollouts), TeacherFeature(TeacherSettings())
    mistakes = Mistakes()
    teacher.check_media(mistakes)
    none.check_words(object())
    none.check_media(mistakes)
    assert mistakes.sentences == [why]
    assert teacher.trains_alone and not none.trains_alone
    needs = step_needs(one_model_flags(STEP, "--distill t.jsonl"))
    assert needs == StepNeeds({"--distill": True}, "the teacher is read in the training forward pass")
    assert step_needs(one_model_flags(STEP, "")) == StepNeeds({}, "")


def test_words_are_compared_where_there_is_a_teacher(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(opening, "check_same_words", lambda *given: seen.append(given))
    settings, tokenizer = TeacherSettings("t"), object()
    TeacherFeature(settings).check_words(tokenizer)
    assert seen == [(settings, tokenizer)]


def test_a_teacher_of_step_1_reads_its_rows_and_no_paths():
    flags = one_model_flags(STEP, "--distill t.jsonl --parallel_thinking --max_seq_len 77 --padded true")
    assert flags.added.of(SftTeacherArguments).distill == "t.jsonl"
    assert teacher_of(flags).settings == TeacherSettings(file="t.jsonl", padded=True, longest_tokens=77)
    mistakes = Mistakes()
    check_beside_teacher(flags, mistakes)
    with pytest.raises(ThreestepError, match="--parallel_thinking lays out paths side by side, but the teacher of"):
        mistakes.raise_if_any()


def read_of(total: float, covered: float, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        compared=HeadComparison(torch.tensor(total, requires_grad=True), torch.tensor(covered)),
        logprobs_M=torch.zeros(tokens),
    )


def test_parts_add_up_to_the_mean_of_the_step():
    guest = LiveDistillation(0.5, covers_all=False, compare=lambda rows, temperature: None)
    documents = [
        plain(TokenSequence(torch.arange(4), torch.tensor([False, True, True, True]))),
        plain(TokenSequence(torch.arange(3), torch.tensor([False, False, True]))),
    ]
    counted = guest.tally(documents)
    assert counted == 4
    step = guest.begin([], None, counted)
    parts = [step.loss_part(None, read_of(3.0, 2.5, 3)), step.loss_part(None, read_of(1.0, 0.5, 1))]
    assert sum(parts).item() == pytest.approx(0.5 * 4.0 / 4) and parts[0].requires_grad
    assert step.loss_part(None, None) == 0.0  # of texts beside the rollout
    totals = {name: float(value) for name, value in step.sums.items()}
    assert step.end("actor", totals) == {"actor/teacher_divergence": 1.0, "actor/teacher_mass": 0.75}
    assert guest.evaluated("eval", {**totals, "teacher_tokens": 0.0}) == {}
    assert set(guest.forward_kwargs(None)) == {"compare"} and "teacher" in guest.why_not_ahead
    assert guest.begin([], None, 3).end("actor", {}) == {}  # nothing was read


@pytest.mark.parametrize("stage", [2, 3])
def test_its_weights_are_counted(tmp_path, stage: int):
    """Whole below ZeRO-3, 4 bytes each; half of them on each of two ranks under it."""
    teacher = tiny_causal_lm("llama")
    teacher.save_pretrained(tmp_path)
    weights = sum(weight.numel() for weight in teacher.parameters())
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(tiny_config("llama"))
    settings, device = EngineSettings(dtype="fp32", zero_stage=0), PlannedDevice(is_cuda=False)
    asked = TeacherSettings(str(tmp_path), zero_stage=stage)
    [sentence], held, moments = plan_teacher(student, asked, settings, 2, device=device)
    assert sentence == f"teacher: {tmp_path}, {weights:,} weights"
    assert held[0].device_bytes == 4 * (weights if stage < 3 else -(-weights // 2))
    assert held[0].name.startswith("teacher: weights") and held[-1].device_bytes > 4 * 64 * 32
    assert [moment.doing for moment in moments] == ([] if stage < 3 else ["in a forward pass of the teacher"])
    assert plan_teacher(student, TeacherSettings(), settings, 2, device=device) == ([], [], [])


def policy_of(folder: Any) -> Any:
    """A stand-in for the engine of the student in `folder`."""
    ranks = SimpleNamespace(device=torch.device("cpu"), is_main=True, rank=0, world_size=1)
    student = PolicyModel(load_causal_lm(ModelSettings(str(folder)), torch.float32, 0))
    return SimpleNamespace(module=student, ranks=ranks, settings=EngineSettings())


def load_under(settings: EngineSettings, load: Any) -> Any:
    return load(torch.float32)


@pytest.fixture
def folders(tmp_path) -> Any:
    changes = {"student": {}, "teacher": {"vocab_size": 72}, "capped": {}}
    for name, changed in changes.items():
        family = "gemma2" if name == "capped" else "llama"
        tiny_causal_lm(family, seed=1, **changed).save_pretrained(tmp_path / name)
    return tmp_path


def test_what_is_compared_and_what_is_refused(folders):
    policy = policy_of(folders / "student")
    assert open_teacher(TeacherSettings(), policy, load_under) is None
    name, capped = str(folders / "teacher"), TeacherSettings(str(folders / "capped"), padded=True)
    settings = TeacherSettings(name, coef=0.3, compared=DivergenceSettings(top_k=4), longest_tokens=20)
    guest = open_teacher(settings, policy, load_under)
    assert guest.coefficient == 0.3 and not guest.covers_all
    assert guest.compare.__self__.vocabulary == 64  # of both
    with pytest.raises(ThreestepError, match="--teacher_top_k 64 must be less than the vocabulary size, 64"):
        open_teacher(TeacherSettings(name, compared=DivergenceSettings(top_k=64)), policy, load_under)
    with pytest.raises(
        ThreestepError, match="the logits of .*capped .Gemma2ForCausalLM. do not come from one linear layer"
    ):
        open_teacher(capped, policy, load_under)


class Words(SimpleNamespace):
    """A tokenizer of so many tokens."""

    def __len__(self) -> int:
        return self.tokens

    def get_vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(self.tokens)}


def test_its_engine_has_its_own_stage():
    student = EngineSettings(dtype="bf16", zero_stage=2, offload=True, own_config=object())
    assert engine_settings(TeacherSettings("t"), student) == EngineSettings(dtype="bf16", zero_stage=2)
    own = engine_settings(TeacherSettings("t", zero_stage=3, offload=True), student)
    assert own == EngineSettings(dtype="bf16", zero_stage=3, offload=True)


def test_another_tokenizer_is_refused(monkeypatch):
    student, teacher = (Words(tokens=count, pad_token="0", eos_token_id=1, name_or_path="s") for count in (5, 6))
    monkeypatch.setattr("threestep.plugins.distillation.opening.load_tokenizer", lambda *_, **__: teacher)
    with pytest.raises(ThreestepError, match="'t' .6 tokens. and of the model in training 's' .5 tokens. differ, so"):
        check_same_words(TeacherSettings("t"), student)
