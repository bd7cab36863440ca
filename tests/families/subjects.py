"""What the sweep knows of a family before it asks: its folder, its plain model, its sequences, their true
log-probabilities.

The truth is plain transformers: `AutoModelForCausalLM.from_pretrained(folder)(input_ids).logits`, each sequence alone.

M tokens to be predicted, T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.families.builds import FIRST_ID, LAST_ID
from tests.families.configs import WINDOW
from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt, unshared

# (tokens of the prompt, tokens of its responses); longer than the families' windows, and short enough to be within.
LONG = ((9, (6, 11, 3)), (5, (12, 8)), (4, (13,)))
SHORT = ((3, (2, 4, 1)), (2, (5, 3)), (2, (6,)))

_EXACT = 2e-5  # the tolerance of a family in float64


@dataclass(frozen=True)
class Subject:
    """A family at one precision.

    runs: why plain transformers computes no logits from token ids alone; "" where it does.
    looks_ahead: how far a later token moves the log-probabilities of earlier ones; 0 of a causal model.
    tolerance: of log-probabilities, largest difference that rounding explains.
    """

    family: str
    folder: Path
    dtype: torch.dtype
    model: Any
    runs: str
    looks_ahead: float
    tolerance: float
    scalar_folder: Path | None = None

    @property
    def is_causal(self) -> bool:
        return self.looks_ahead <= self.tolerance

    def in_float32(self) -> Subject:
        return self if self.dtype is torch.float32 else _known(self.family, self.folder, torch.float32)


def known(family: str, folder: Path, auto_class: Any = AutoModelForCausalLM) -> Subject:
    """Return what is known of the model in `folder`: in float64 where the family computes all of it in float64, else in
    float32."""
    subject = _known(family, folder, torch.float64, auto_class)
    in_parts = subject.tolerance > _EXACT or 1e-12 < subject.looks_ahead < _EXACT
    return _known(family, folder, torch.float32, auto_class) if subject.runs or in_parts else subject


def _known(family: str, folder: Path, dtype: torch.dtype, auto_class: Any = AutoModelForCausalLM) -> Subject:
    model = auto_class.from_pretrained(folder, dtype=dtype).eval()
    blank = Subject(family, folder, dtype, model, "", 0.0, 1e-3)
    ids_T = drawn_ids(23, seed=7)
    try:
        before_TV = torch.log_softmax(logits(model, ids_T).double(), -1)
    except Exception as problem:  # noqa: BLE001 - each family has its own error
        return replace(blank, runs=f"{type(problem).__name__}: {str(problem).splitlines()[0]}")
    later_T = ids_T.clone()
    half = len(ids_T) // 2
    later_T[half:] = drawn_ids(len(ids_T) - half, seed=8)
    after_TV = torch.log_softmax(logits(model, later_T).double(), -1)
    # Some families compute parts in float32 whatever the weights are.
    tolerance = _EXACT if logits(model, ids_T).dtype is torch.float64 else 1e-3
    return replace(blank, tolerance=tolerance, looks_ahead=float((before_TV - after_TV)[:half].abs().max()))


def drawn_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(FIRST_ID, LAST_ID, (count,), generator=torch.Generator().manual_seed(seed))


def documents(lengths: tuple[tuple[int, tuple[int, ...]], ...]) -> list[Document]:
    """Return documents of prompts with their responses, whose tokens are the targets."""

    def run(count: int, seed: int, is_target: bool) -> TokenSequence:
        return TokenSequence(drawn_ids(count, seed), torch.full((count,), is_target))

    return [
        shared_prompt(
            run(prompt, 100 + number, False),
            [run(count, 10 * number + place, True) for place, count in enumerate(responses)],
        )
        for number, (prompt, responses) in enumerate(lengths)
    ]


def alone(shared: list[Document]) -> list[TokenSequence]:
    """Return each sequence of the documents with its own copy of the prompt, in their order."""
    return [part.segments[0].tokens for document in shared for part in unshared(document)]


def one_by_one(shared: list[Document]) -> list[Document]:
    return [plain(sequence) for sequence in alone(shared)]


def logits(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """Return [T, V] of one sequence. Some families fail with their own cache, which nothing here needs."""
    with torch.no_grad():
        try:
            return model(input_ids=ids_T.unsqueeze(0)).logits[0]
        except AttributeError:
            return model(input_ids=ids_T.unsqueeze(0), use_cache=False).logits[0]


def true_logprobs(model: Any, sequences: list[TokenSequence]) -> torch.Tensor:
    """Return float64 [M], those of all targets, sequence by sequence."""
    parts = []
    for sequence in sequences:
        logprobs_TV = torch.log_softmax(logits(model, sequence.input_ids).double(), -1)
        columns = torch.nonzero(sequence.is_target).flatten()
        parts.append(logprobs_TV[columns - 1, sequence.input_ids[columns]])
    return torch.cat(parts)


def plain_scalar_model(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()


def true_scores(model: Any, sequences: list[TokenSequence]) -> torch.Tensor:
    """Return float64 [sequences], those of plain transformers, which reads the last token that is not pad."""
    with torch.no_grad():
        return torch.stack([model(input_ids=part.input_ids.unsqueeze(0)).logits[0, 0] for part in sequences]).double()


def longest_tokens(shared: list[Document]) -> int:
    return max(len(sequence) for sequence in alone(shared))


assert max(prompt + max(responses) for prompt, responses in SHORT) <= WINDOW
