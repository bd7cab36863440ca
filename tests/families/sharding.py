"""Is a family the same function in an engine of ZeRO stage 0 and 3, in float32 and bfloat16; do its buffers keep their
precision; and is the model that is saved from it, or lent to rollouts, the function that was trained.

The truth is plain transformers in the same precision, sequence by sequence; how far plain transformers itself moves
with the precision is the measure.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from training.utils.engine.settings import EngineSettings
from transformers import AutoModelForCausalLM

from tests.families.answers import RIGHT, WRONG, Answer, asked, compared
from tests.families.configs import PAD, VOCABULARY
from tests.families.learning import engine_of
from tests.families.reading import answers_of_rollout, saved
from tests.families.subjects import LONG, Subject, alone, documents, true_logprobs
from training.utils.engine.startup import DTYPES, Ranks
from training.utils.engine.whole_model import WholeModel
from training.utils.layout.rows import padded_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel
from training.utils.opening.setup import load_under

CASES = tuple((stage, dtype) for dtype in ("fp32", "bf16") for stage in (0, 3))


def ask_zero(subject: Subject, place: Path, ranks: Ranks) -> list[Answer]:
    answers = []
    sequences = alone(documents(LONG))
    exact = true_logprobs(subject.in_float32().model, sequences)
    for stage, dtype in CASES:
        question = f"zero{stage}.{dtype}"
        plain = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=DTYPES[dtype]).eval()
        # One by one, no padding: the same operations, so far less than the precision's own noise.
        noise = float((true_logprobs(plain, sequences) - exact).abs().max())
        here = replace(subject, dtype=DTYPES[dtype], model=plain, tolerance=max(1e-3, noise / 2))
        answers += asked(
            question, lambda here=here, stage=stage, dtype=dtype: _of_case(here, stage, dtype, place, ranks)
        )
    return answers


def _of_case(subject: Subject, stage: int, dtype: str, place: Path, ranks: Ranks) -> list[Answer]:
    question = f"zero{stage}.{dtype}"
    model = load_under(
        EngineSettings(dtype=dtype, zero_stage=stage),
        ranks,
        lambda of: load_causal_lm(ModelSettings(str(subject.folder), dropout=0.0), of, VOCABULARY),
    )
    engine = engine_of(PolicyModel(model), ranks, dtype=dtype, zero_stage=stage)
    engine.eval()
    sequences = alone(documents(LONG))
    with torch.no_grad():
        read = torch.cat([engine(padded_rows([part], PAD)).logprobs_M.double() for part in sequences])
    truth = true_logprobs(subject.model, sequences)
    answers = [
        compared(f"{question}.read", float((read - truth).abs().max()), subject.tolerance),
        _of_buffers(f"{question}.buffers", model, subject.model),
    ]
    if stage == 3:
        whole = WholeModel(engine, model)
        with whole.lent() as copy:
            answers.append(_of_buffers(f"{question}.lent_buffers", copy, subject.model))
            if dtype == "fp32":
                answers += answers_of_rollout(subject, copy, f"{question}.rollout")[:1]
        state = engine.full_state(model)
        folder = saved(model, state, place / f"saved_{question}")
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=subject.dtype).eval()
        answers.append(
            compared(f"{question}.saved", float((true_logprobs(again, sequences) - truth).abs().max()), 1e-6)
        )
    return answers


def _of_buffers(question: str, model: Any, plain: Any) -> Answer:
    """Compare buffers that plain transformers computes in floating point with those of a model of ours."""
    ours = dict(model.named_buffers())
    worst, said = 0.0, ""
    for name, buffer in plain.named_buffers():
        if not buffer.is_floating_point() or name not in ours or buffer.numel() == 0:
            continue
        difference = float((ours[name].double().cpu() - buffer.double()).abs().nan_to_num(posinf=0.0).max())
        if ours[name].dtype is not buffer.dtype or difference > worst:
            worst, said = max(worst, difference), f"{name}: {ours[name].dtype} for {buffer.dtype}"
    return Answer(question, WRONG if said else RIGHT, worst, said)
