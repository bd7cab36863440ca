"""Is a family the same function in an engine of ZeRO stage 0 and 3, in float32 and bfloat16; do its buffers keep their
precision; and is the model that is saved from it, or lent to rollouts, the function that was trained.

The truth is plain transformers in the same precision, sequence by sequence; how far plain transformers itself moves
with the precision is the measure.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.families.answers import RIGHT, WRONG, Answer, compared
from tests.families.configs import PAD
from tests.families.learning import engine_of
from tests.families.reading import answers_of_rollout, load, saved
from tests.families.subjects import LONG, Subject, alone, documents, true_logprobs
from training.utils.contracts.documents import TokenSequence
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import DTYPES, Ranks
from training.utils.engine.whole_model import WholeModel
from training.utils.layout.rows import padded_rows
from training.utils.models.layout_check import notes_on
from training.utils.models.one_precision import ROUNDS
from training.utils.models.token_model import PolicyModel
from training.utils.setup.setup import load_under, may_pack

CASES = tuple((stage, dtype) for dtype in ("fp32", "bf16") for stage in (0, 3))


def _in_dtype(folder: Path, dtype: torch.dtype, is_rounded: bool) -> Any:
    """Return the plain model. is_rounded: with all its weights in `dtype`, as a note of ours says of the run."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for weight in model.parameters() if is_rounded else ():
        weight.data = weight.data.to(dtype)
    return model


def _plain_in(subject: Subject, dtype: str, exact: torch.Tensor, is_rounded: bool) -> Subject | None:
    """Return the subject in another precision; None where plain transformers does not run in it.

    One by one and without padding, the engine takes the same operations: it is as far from exact numbers as plain
    transformers at the most, and so no further from plain transformers than twice that. Logits of 4 in bfloat16 are
    0.016 apart.
    """
    plain = _in_dtype(subject.folder, DTYPES[dtype], is_rounded)
    try:
        noise = float((true_logprobs(plain, alone(documents(LONG))) - exact).abs().max())
    except RuntimeError:
        return None
    least = 0.02 if dtype == "bf16" else 1e-3
    return replace(subject, dtype=DTYPES[dtype], model=plain, tolerance=max(least, 2 * noise))


def _nearer(read_M: torch.Tensor, truth_M: torch.Tensor, plain: Any, sequences: list[TokenSequence]) -> float:
    """Return how far `read_M` is from plain transformers, or from plain transformers whose attention is computed in
    float32, as ours of short rows is in bfloat16 on a CPU: the nearer one.

    A mixture of experts may send a token to another expert for that last bit, and is 0.8 nats off then (aria_text),
    while the engine and plain transformers with attention in float32 agree to 4e-7.
    """
    with mock.patch.object(F, "scaled_dot_product_attention", partial(_in_float32, F.scaled_dot_product_attention)):
        finer_M = true_logprobs(plain, sequences)
    return min(float((read_M - other_M).abs().max()) for other_M in (truth_M, finer_M))


def _in_float32(attend: Any, *states: torch.Tensor, attn_mask: torch.Tensor | None = None, **others: Any) -> Any:
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    dtype = states[0].dtype
    return attend(*(one.float() for one in states), attn_mask=attn_mask, **others).to(dtype)


def ask_zero(of: Subject, place: Path, ranks: Ranks, stage: int, dtype: str) -> list[Answer]:
    """stage, dtype: one of CASES."""
    question = f"zero{stage}.{dtype}"
    model = load_under(
        EngineSettings(dtype=dtype, zero_stage=stage),
        ranks,
        lambda torch_dtype: load(of.folder, torch_dtype),
    )
    said = "; ".join(notes_on(model))
    is_rounded = ROUNDS in said
    exact = true_logprobs(of.in_float32().model, alone(documents(LONG)))
    subject = _plain_in(of, dtype, exact, is_rounded)
    engine = engine_of(PolicyModel(model), ranks, dtype=dtype, zero_stage=stage)
    engine.eval()
    sequences = alone(documents(LONG))
    may_pack(
        True,
        model,
        engine,
        lambda rows: engine(rows).logprobs_M,
        longest_tokens=max(map(len, sequences)),
        log=lambda *_: None,
    )
    if subject is None:
        return [Answer(question, WRONG, None, f"plain transformers does not run in {dtype}, and this is not refused")]
    with torch.no_grad():
        read = torch.cat([engine(padded_rows([part], PAD)).logprobs_M.double() for part in sequences])
    truth = true_logprobs(subject.model, sequences)
    nearest = _nearer(read, truth, subject.model, sequences)
    answers = [
        compared(f"{question}.read", nearest, subject.tolerance, said),
        _of_buffers(f"{question}.buffers", model, subject.model),
    ]
    if stage == 3:
        whole = WholeModel(engine, model)
        with whole.lent() as copy:
            answers.append(_of_buffers(f"{question}.lent_buffers", copy, subject.model))
            if dtype == "fp32":
                answers += answers_of_rollout(subject, model, copy, f"{question}.rollout")[:1]
        state = engine.full_state(model)
        folder = saved(model, state, place / f"saved_{question}")
        again = _in_dtype(folder, subject.dtype, is_rounded)
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
