"""A frozen teacher, read on the rows that the student learns from.

M tokens to be predicted, U different ones of these, C of a chunk, H hidden size, V vocabulary, k of the teacher's most
likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from training.utils.distillation.divergence import divergence, with_rest
from training.utils.distillation.head_loss import ComparedTokens, compared_at_head, rows_of_chunk

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.distillation.settings import DivergenceSettings
    from training.utils.engine.frozen import FrozenModel
    from training.utils.models.target_head import AtHead, TargetHead
    from training.utils.models.token_model import PolicyModel


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
        copies_U, predictor_U = copies_of(rows), rows.reads()[1]
        # The student's pad token may be one that the teacher lacks; no token sees it.
        known = replace(rows, input_ids_NT=rows.input_ids_NT.clamp(max=self.head_rows - 1))

        def predicting(policy: PolicyModel, _: TokenRows, hidden_LH: torch.Tensor) -> torch.Tensor:
            return hidden_LH.index_select(0, predictor_U)

        states_UH = self.frozen(known.without_targets(), after_trunk=predicting).beside

        def at_head(hidden_UH: torch.Tensor, head: TargetHead, chunk_bytes: int) -> ComparedTokens:
            def compare(logits_CV: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
                with torch.no_grad():
                    teacher_CV = functional.linear(states_UH[here], self.head.weight, self.head.bias)
                    teacher_CV = self._logprobs(teacher_CV.to(logits_CV.dtype), temperature)
                return compared(self._logprobs(logits_CV, temperature), teacher_CV, self.settings)

            with self.frozen.whole(list(self.head.parameters())):
                rows_C = rows_of_chunk(chunk_bytes, max(len(head.weight), len(self.head.weight)))
                return compared_at_head(hidden_UH, head, copies_U, compare, rows=rows_C)

        return at_head

    @property
    def head_rows(self) -> int:
        """Tokens that the teacher can read."""
        return int(self.frozen.model.config.get_text_config().vocab_size)

    def _logprobs(self, logits_CV: torch.Tensor, temperature: float) -> torch.Tensor:
        logits_CV = logits_CV[:, : self.vocabulary]
        return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)


def copies_of(rows: TokenRows) -> torch.Tensor:
    """Return int64 [U]: how many sequences have each of the different targets."""
    _, predictor_U, read_M = rows.reads()
    if read_M is None:
        return torch.ones_like(predictor_U)
    return torch.bincount(read_M, minlength=len(predictor_U))


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
