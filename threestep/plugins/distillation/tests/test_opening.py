"""A teacher that cannot be compared is refused in one sentence, before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.distillation.opening import check_same_words, engine_settings, open_teacher
from threestep.plugins.distillation.settings import DivergenceSettings, TeacherSettings
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineSettings
from training.utils.loading.models import load_causal_lm
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel


def policy_of(folder: Any) -> Any:
    """A stand-in for the engine of the student in `folder`."""
    ranks = SimpleNamespace(device=torch.device("cpu"), is_main=True, rank=0, world_size=1)
    student = PolicyModel(load_causal_lm(ModelSettings(str(folder)), torch.float32, 0))
    return SimpleNamespace(module=student, ranks=ranks, settings=EngineSettings())


def load_under(settings: EngineSettings, load: Any) -> Any:
    return load(torch.float32)


@pytest.fixture
def folders(tmp_path) -> Any:
    for name, family, changes in (
        ("student", "llama", {}),
        ("teacher", "llama", {"vocab_size": 72}),
        ("capped", "gemma2", {}),
    ):
        tiny_causal_lm(family, seed=1, **changes).save_pretrained(tmp_path / name)
    return tmp_path


def test_what_is_compared_and_what_is_refused(folders):
    policy = policy_of(folders / "student")
    assert open_teacher(TeacherSettings(), policy, load_under) is None
    settings = TeacherSettings(
        str(folders / "teacher"), coef=0.3, compared=DivergenceSettings(top_k=4), longest_tokens=20
    )
    guest = open_teacher(settings, policy, load_under)
    assert guest.coefficient == 0.3 and not guest.covers_all
    assert guest.compare.__self__.vocabulary == 64  # of both
    with pytest.raises(ThreestepError, match="--teacher_top_k 64 expects less than the vocabulary of 64 tokens"):
        open_teacher(
            TeacherSettings(str(folders / "teacher"), compared=DivergenceSettings(top_k=64)), policy, load_under
        )
    with pytest.raises(ThreestepError, match="the logits of .*capped .Gemma2ForCausalLM. are not one linear layer"):
        open_teacher(TeacherSettings(str(folders / "capped"), padded=True), policy, load_under)


def test_its_engine_has_its_own_stage():
    student = EngineSettings(dtype="bf16", zero_stage=2, offload=True, own_config=object())
    assert engine_settings(TeacherSettings("t"), student) == EngineSettings(dtype="bf16", zero_stage=2)
    own = engine_settings(TeacherSettings("t", zero_stage=3, offload=True), student)
    assert own == EngineSettings(dtype="bf16", zero_stage=3, offload=True)


def test_another_tokenizer_is_refused(monkeypatch):
    def tokenizer(tokens: int) -> Any:
        vocabulary = {str(index): index for index in range(tokens)}
        return SimpleNamespace(
            get_vocab=lambda: vocabulary, pad_token="0", eos_token_id=1, name_or_path="s", __len__=None
        )

    class Sized(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.get_vocab())

    student, teacher = (Sized(**vars(tokenizer(count))) for count in (5, 6))
    monkeypatch.setattr("threestep.plugins.distillation.opening.load_tokenizer", lambda *_, **__: teacher)
    with pytest.raises(ThreestepError, match="'t' .6 tokens. and of the model in training 's' .5 tokens. differ, and"):
        check_same_words(TeacherSettings("t"), student)
