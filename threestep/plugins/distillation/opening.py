"""Opens the teacher of a run, checked before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.distillation.guest import LiveDistillation, StoredDistillation
from threestep.plugins.distillation.server import ServerTeacher
from threestep.plugins.distillation.stored import FileTeacher
from threestep.plugins.distillation.teacher import Teacher
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.collectives import from_main
from training.utils.engine.training_engine import FrozenModel
from training.utils.loading.configurations import check_positions
from training.utils.loading.models import load_causal_lm
from training.utils.loading.tokenizers import load_tokenizer, same_tokenizer
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel
from training.utils.models.weights import whole_shape

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from threestep.plugins.distillation.guest import Distillation
    from threestep.plugins.distillation.settings import TeacherSettings
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.token_model import TargetHead

# Loads a model under these settings of its engine, given what loads it in a precision; a collective.
LoadUnder = Callable[["EngineSettings", Callable[[Any], Any]], Any]


def check_same_words(settings: TeacherSettings, student: PreTrainedTokenizerBase) -> None:
    """ThreestepError if the teacher would read other words than the student writes, or fewer of them."""
    name = settings.name_or_path
    if settings.url is not None:
        server = ServerTeacher(settings.url, settings.compared.top_k)
        server.check(lambda text: list(student(text, add_special_tokens=False)["input_ids"]))
    if name is None:
        return
    teacher = load_tokenizer(name, end_may_pad=True, trust_remote_code=settings.trust_remote_code)
    if not same_tokenizer(student, teacher):
        raise ThreestepError(
            f"the tokenizers of --teacher_model_name_or_path '{name}' ({len(teacher)} tokens) and of the model in "
            f"training '{student.name_or_path}' ({len(student)} tokens) differ, so the models' distributions cannot be "
            "compared token by token; use a teacher of the same family"
        )
    check_positions(model_settings(settings), settings.longest_tokens, "the length flags")


def open_teacher(settings: TeacherSettings, policy: TrainingEngine, load_under: LoadUnder) -> Distillation | None:
    """Return the guest of the model that `policy` trains; None without a teacher. A collective.

    Raises ThreestepError for a teacher, or a student, that cannot be compared so.
    """
    if not settings.is_there:
        return None
    student: Any = policy.module
    own = _linear_head(student, "the student")
    compared, covers_all = settings.compared, not (settings.compared.top_k or settings.file)
    if settings.url is not None:
        server = ServerTeacher(settings.url, compared.top_k)
        return StoredDistillation(settings.coef, covers_all, server.top_tokens, compared)
    path = None if settings.file is None else Path(settings.file)
    writes = path is not None and not from_main(path.exists() if policy.ranks.is_main else None)
    teacher = None
    if settings.name_or_path is not None and (path is None or writes):
        teacher = _loaded(settings, policy, load_under, whole_shape(own.weight)[0])
    if path is None:
        assert teacher is not None, "it is there by one of three flags"
        return LiveDistillation(settings.coef, covers_all, teacher.compare)
    file = FileTeacher(path, teacher, policy.ranks)
    return StoredDistillation(settings.coef, covers_all, file.top_tokens, compared, file.open)


def _loaded(settings: TeacherSettings, policy: TrainingEngine, load_under: LoadUnder, width: int) -> Teacher:
    """Return a teacher in this process. width: of the student's output layer. A collective."""
    name, ranks, compared = str(settings.name_or_path), policy.ranks, settings.compared
    engine = engine_settings(settings, policy.settings)
    loading: Any = {"longest_tokens": settings.longest_tokens, "device": ranks.device}

    def load(dtype: torch.dtype) -> PreTrainedModel:
        return load_causal_lm(model_settings(settings), dtype, 0, **loading)

    plain = PolicyModel(load_under(engine, load))
    head = _linear_head(plain, name)
    frozen = FrozenModel(plain, engine, ranks)
    _check_layout(settings, frozen, ranks.device)
    vocabulary = min(width, whole_shape(head.weight)[0])
    if compared.top_k >= vocabulary:
        raise ThreestepError(
            f"--teacher_top_k {compared.top_k} must be less than the vocabulary size, {vocabulary:,}; 0 compares all "
            "tokens"
        )
    of_what = f"its {compared.top_k} most likely tokens and the rest" if compared.top_k else f"{vocabulary:,} tokens"
    log(f"teacher: '{name}', {compared.kind} divergence over {of_what}", ranks.is_main)
    return Teacher(frozen, head, compared, vocabulary)


def engine_settings(settings: TeacherSettings, student: EngineSettings) -> EngineSettings:
    """Return the settings of the teacher's engine: of ZeRO its own stage, else those of the student's."""
    stage = student.zero_stage if settings.zero_stage is None else settings.zero_stage
    return replace(student, zero_stage=stage, offload=settings.offload, own_config=None)


def model_settings(settings: TeacherSettings) -> ModelSettings:
    """Return settings for loading the teacher."""
    assert settings.name_or_path is not None
    return ModelSettings(settings.name_or_path, trust_remote_code=settings.trust_remote_code)


def _linear_head(policy: PolicyModel, name: str) -> TargetHead:
    if policy.target_head is None:
        raise ThreestepError(
            f"distillation compares output layers chunk by chunk, but the logits of {name} "
            f"({type(policy.model).__name__}) do not come from one linear layer on its last hidden states; use "
            "another model family"
        )
    return policy.target_head


def _check_layout(settings: TeacherSettings, frozen: FrozenModel, device: torch.device) -> None:
    """ThreestepError unless the teacher reads the rows of the run as its own forward reads single sequences."""

    def read(rows: TokenRows) -> torch.Tensor:
        return frozen(rows).logprobs_M

    check_padded(frozen.model, read, device)
    if settings.padded:
        return
    reason = why_not_packed(frozen.model, read, settings.longest_tokens, device)
    if reason is not None:
        raise ThreestepError(
            f"the teacher '{settings.name_or_path}' does not support packed rows: {reason}; add --padded"
        )
