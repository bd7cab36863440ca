"""A frozen teacher, read on the rows that the student learns from.

M tokens to be predicted, U different ones of these, C of a chunk, H hidden size, V vocabulary, k of the teacher's most
likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from threestep.plugins.distillation.divergence import divergence, with_rest
from threestep.plugins.distillation.head_loss import HeadComparison, compared_at_head, copies_of, rows_of_chunk
from threestep.plugins.distillation.top_tokens import TopTokens
from training.utils.models.token_model import CHUNK_BYTES

if TYPE_CHECKING:
    from threestep.plugins.distillation.settings import DivergenceSettings
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.training_engine import FrozenModel
    from training.utils.models.token_model import AtHead, PolicyModel, TargetHead


@dataclass(frozen=True)
class Teacher:
    """A language model whose logits are one linear layer on its last states.

    vocabulary: the tokens that both models' output layers have. Wider ones are filled up to a round number, with tokens
        that no text has; both distributions are those over the tokens that both have.
    """

    frozen: FrozenModel
    head: TargetHead
    settings: DivergenceSettings
    vocabulary: int

    def compare(self, rows: TokenRows, temperature: float) -> AtHead:
        """Read the teacher's states of `rows`; return what compares it with the student, at the temperature of both. A
        collective under ZeRO-3, here and there."""
        copies_U, states_UH = copies_of(rows), self._states(rows)

        def at_head(hidden_UH: torch.Tensor, head: TargetHead, chunk_bytes: int) -> HeadComparison:
            def compare(logits_CV: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
                with torch.no_grad():
                    teacher_CV = functional.linear(states_UH[here], self.head.weight, self.head.bias)
                    teacher_CV = self._logprobs(teacher_CV.to(logits_CV.dtype), temperature)
                return compared(self._logprobs(logits_CV, temperature), teacher_CV, self.settings)

            with self.frozen.whole(list(self.head.parameters())):
                rows_C = rows_of_chunk(chunk_bytes, max(len(head.weight), len(self.head.weight)))
                return compared_at_head(hidden_UH, head, copies_U, compare, rows=rows_C)

        return at_head

    @torch.no_grad()
    def top_tokens(self, rows: TokenRows, chunk_bytes: int = CHUNK_BYTES) -> TopTokens:
        """Return the likeliest tokens after each of the U beginnings, at temperature 1. A collective under ZeRO-3."""
        states_UH, parts = self._states(rows), list[TopTokens]()
        with self.frozen.whole(list(self.head.parameters())):
            rows_C = rows_of_chunk(chunk_bytes, len(self.head.weight))
            for begin in range(0, max(1, len(states_UH)), rows_C):
                logits_CV = functional.linear(states_UH[begin : begin + rows_C], self.head.weight, self.head.bias)
                logprobs_CV = self._logprobs(logits_CV.float(), 1.0)
                ids_Ck = logprobs_CV.topk(self.settings.top_k, dim=-1).indices
                found_Ck = with_rest(logprobs_CV, ids_Ck)
                parts.append(TopTokens(ids_Ck, found_Ck[:, :-1], found_Ck[:, -1]))
        return TopTokens(*map(torch.cat, zip(*parts, strict=True)))

    def _states(self, rows: TokenRows) -> torch.Tensor:
        """Return [U, H], the last states that predict the different targets."""
        predictor_U = rows.reads()[1]
        # The student's pad token may be one that the teacher lacks; no token sees it.
        known = replace(rows, input_ids_NT=rows.input_ids_NT.clamp(max=self.head_rows - 1))

        def predicting(policy: PolicyModel, _: TokenRows, hidden_LH: torch.Tensor, part: None) -> torch.Tensor:
            return hidden_LH.index_select(0, predictor_U)

        states_UH: torch.Tensor = self.frozen(known.without_targets(), after_trunk=predicting).beside
        return states_UH

    @property
    def head_rows(self) -> int:
        """Tokens that the teacher can read."""
        return int(self.frozen.model.config.get_text_config().vocab_size)

    def _logprobs(self, logits_CV: torch.Tensor, temperature: float) -> torch.Tensor:
        logits_CV = logits_CV[:, : self.vocabulary]
        return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)


def compared(
    student_CV: torch.Tensor, teacher_CV: torch.Tensor, settings: DivergenceSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [C] divergences of log-probabilities, and [C] the teacher's probability of the tokens that are compared
    one by one."""
    if not settings.top_k:
        return divergence(student_CV, teacher_CV, settings), torch.ones_like(teacher_CV[:, 0])
    ids_Ck = teacher_CV.topk(settings.top_k, dim=-1).indices
    teacher_Ck = with_rest(teacher_CV, ids_Ck)  # and the rest
    return divergence(with_rest(student_CV, ids_Ck), teacher_Ck, settings), teacher_Ck[:, :-1].exp().sum(dim=-1)
