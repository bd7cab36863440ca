"""Is a family saved as it was loaded, are its log-probabilities its own in every layout of rows, and are rollouts with
a cache drawn from it.

M tokens to be predicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.families.answers import REFUSED, RIGHT, WRONG, Answer, asked, compared
from tests.families.builds import NoTokenizer
from tests.families.configs import EOS, PAD, VOCABULARY
from tests.families.subjects import (
    LONG,
    SHORT,
    Subject,
    alone,
    documents,
    drawn_ids,
    logits,
    longest_tokens,
    one_by_one,
    true_logprobs,
)
from tests.support.lora_settings import lora_settings
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.contracts.token_rows import TokenRows
from training.utils.engine.zero3 import full_tensors
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.loading.models import load_causal_lm
from training.utils.loading.saving import save_model
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.own_forward import own_forward_of
from training.utils.models.token_model import PolicyModel

CPU = torch.device("cpu")
PROMPTS, RESPONSE = (3, 11, 7), 14  # tokens of the prompts of rollouts, and the most of their responses


def load(folder: Path, dtype: torch.dtype, **settings: Any) -> Any:
    """Load by our code, for sequences as long as the longest that are asked, in rows or rollouts."""
    longest = max(longest_tokens(documents(LONG)), max(PROMPTS) + RESPONSE)
    return load_causal_lm(lora_settings(str(folder), **settings), dtype, VOCABULARY, longest_tokens=longest).eval()


def saved(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    save_model(folder, model, tensors, NoTokenizer())  # type: ignore[arg-type]
    return folder


def ask_saving(subject: Subject, place: Path) -> list[Answer]:
    """Loaded and saved by our code: the same tensors under the same names, and the same function."""
    model = load(subject.folder, subject.dtype)
    logits(model, drawn_ids(9, seed=2))  # a run evaluates before it saves
    tensors = {name: tensor.clone() for name, tensor in full_tensors(model, 0)}
    folder = saved(model, tensors, place / "saved")
    again, report = AutoModelForCausalLM.from_pretrained(folder, dtype=subject.dtype, output_loading_info=True)
    troubles = [f"{what}: {sorted(map(str, names))[:3]}" for what, names in report.items() if names]
    before = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=subject.dtype)
    state, found = before.state_dict(), again.state_dict()
    troubles += [f"other {name}" for name in state if name not in found or not torch.equal(state[name], found[name])]
    if troubles:
        return [Answer("save.tensors", WRONG, None, "; ".join(troubles[:4]))]
    ids_T = drawn_ids(19, seed=1)
    difference = float((logits(subject.model, ids_T) - logits(again.eval(), ids_T)).abs().max())
    return [compared("save.function", difference, subject.tolerance / 1e3)]


# Log-probabilities in rows


@dataclass(frozen=True)
class Layout:
    """name: of the question. rows: what the model reads. sharing: None where rows are padded."""

    name: str
    rows: TokenRows
    sharing: bool | None


def layouts(shared: list[Any], prefix: str) -> list[Layout]:
    """Return the same sequences padded, packed, and with prompts shared, targets in the same order."""
    apart = one_by_one(shared)
    half = len(apart) // 2
    return [
        Layout(f"{prefix}.padded", padded_rows(alone(shared), PAD), None),
        Layout(f"{prefix}.packed", packed_rows([apart[:half], apart[half:]], PAD), False),
        Layout(f"{prefix}.shared", packed_rows([shared[:1], shared[1:]], PAD), True),
    ]


def reading(model: Any) -> Callable[[TokenRows], torch.Tensor]:
    policy = PolicyModel(model)

    def read(rows: TokenRows) -> torch.Tensor:
        with torch.no_grad():
            return policy(rows).logprobs_M

    return read


def ask_rows(subject: Subject, place: Path) -> list[Answer]:
    """In every layout that the start-up check allows, log-probabilities are the model's own."""
    model = load(subject.folder, subject.dtype)
    return answers_of_rows(subject, model, reading(model), lambda shared: true_logprobs(subject.model, alone(shared)))


def answers_of_rows(
    subject: Subject, model: Any, read: Callable[[TokenRows], torch.Tensor], truth: Callable[[Any], torch.Tensor]
) -> list[Answer]:
    """Ask with sequences longer than the family's window and, where that is why they are padded, with shorter ones."""
    answers = answers_of_lengths(subject, model, read, truth, "rows", LONG)
    if any("sliding window" in answer.said for answer in answers):
        answers += answers_of_lengths(subject, model, read, truth, "window", SHORT)
    return answers


def answers_of_lengths(
    subject: Subject, model: Any, read: Callable[[TokenRows], torch.Tensor], truth: Callable[[Any], torch.Tensor],
    prefix: str, lengths: Any,
) -> list[Answer]:  # fmt: skip
    shared = documents(lengths)
    expected = truth(shared)
    answers = []
    for layout in layouts(shared, prefix):

        def find(layout: Layout = layout) -> list[Answer]:
            reason = None
            if layout.sharing is None:
                check_padded(model, read, CPU)
            else:
                reason = why_not_packed(model, read, longest_tokens(shared), CPU, sharing=layout.sharing)
            if reason is not None:
                return [Answer(layout.name, REFUSED, _difference(read, layout.rows, expected), reason)]
            difference = float((read(layout.rows).double() - expected).abs().max())
            return [compared(layout.name, difference, subject.tolerance)]

        answers += asked(layout.name, find)
    return answers


def _difference(read: Callable[[TokenRows], torch.Tensor], rows: TokenRows, expected: torch.Tensor) -> float | None:
    """How far off the layout would have been; None where it does not run."""
    try:
        return float((read(rows).double() - expected).abs().max())
    except Exception:  # noqa: BLE001 - each family refuses in its own way
        return None


# Rollouts


def ask_rollout(subject: Subject, place: Path) -> list[Answer]:
    """Left-padded prompts, a cache: the recorded log-probabilities and the greedy tokens are the model's own."""
    model = load(subject.folder, subject.dtype)
    return answers_of_rollout(subject, model, model, "rollout")


def answers_of_rollout(subject: Subject, model: Any, lent: Any, question: str) -> list[Answer]:
    """By an engine that has first checked what it is lent, the model or a copy of it, as step 3 does."""
    engine, own, notes = TransformersRollout(), own_forward_of(model), []
    assert own is not None, "it is read when it is loaded"

    def check() -> list[Answer]:
        notes.extend(engine.check(contextlib.nullcontext(lent), own))
        return []

    answers = asked(question, check)
    if answers:
        return answers
    said = "; ".join(notes)
    for temperature, name in ((1.0, "sampled"), (0.0, "greedy")):

        def find(temperature: float = temperature, name: str = name) -> list[Answer]:
            rollout = engine.roll_out(lent, _request(temperature))
            return _of_rollout(subject, rollout, f"{question}.{name}", temperature == 0.0, said)

        answers += asked(f"{question}.{name}", find)
    return answers


def _request(temperature: float) -> RolloutRequest:
    """Two responses to each prompt."""
    width = max(PROMPTS)
    prompts = [drawn_ids(count, seed=20 + count) for count in PROMPTS]
    ids_BP = torch.full((3, width), PAD)
    for row, ids in enumerate(prompts):
        ids_BP[row, width - len(ids) :] = ids
    mask_BP = torch.arange(width) >= torch.tensor([[width - len(ids)] for ids in prompts])
    sampling = Sampling(RESPONSE, temperature, 0, 1.0, EOS, PAD)
    return RolloutRequest(ids_BP, mask_BP, sampling, list(range(6)), samples_per_prompt=2)


def _of_rollout(subject: Subject, rollout: Rollout, question: str, is_greedy: bool, said: str) -> list[Answer]:
    sequences = rollout.sequences()
    truth = true_logprobs(subject.model, sequences)
    recorded = rollout.sampled_logprobs_BR[rollout.response_mask_BR].double()
    answers = [compared(question, float((truth - recorded).abs().max()), max(subject.tolerance, 1e-4), said)]
    if is_greedy and answers[0].verdict == RIGHT:
        shortfall = 0.0
        for sequence in sequences:
            logprobs_TV = torch.log_softmax(logits(subject.model, sequence.input_ids).double(), -1)
            columns = torch.nonzero(sequence.is_target).flatten()
            best = logprobs_TV[columns - 1].amax(-1)
            own = logprobs_TV[columns - 1, sequence.input_ids[columns]]
            shortfall = max(shortfall, float((best - own).max()))
        answers.append(compared(f"{question}.tokens", shortfall, max(subject.tolerance, 1e-4)))
    return answers
