"""What passes between the numbered parts of step 3, every field with its shape.

B sequences (of this rank), P prompt tokens, R response tokens (the longest response of the batch).

Worked example, B = 2, P = 3, R = 3, pad id 0, end-of-conversation token 9. Prompts [5 6 7] and [8]; the first
response is [4 9] (ended), the second [3 3 3] (cut by max_answer_seq_len):
    prompt_ids_BP [[5 6 7], [0 0 8]]      response_ids_BR [[4 9 0], [3 3 3]]
    response_lengths_B [2 3]              response_mask_BR [[T T F], [T T T]]      ended_B [T F]
Score 1.5 for the first, KL coefficient 0.1 and log-probability differences d: its
    rewards_BR[0] = [-0.1 d_0, 1.5 - 0.1 d_1, 0]: the score lands on the end token, the last real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from training.utils.data.phases import PromptRow
from training.utils.layout.documents import TokenSequence, join
from training.utils.layout.rows import TokenRows
from training.utils.models.target_head import TokenLogprobs


@dataclass(frozen=True)
class Rollout:
    """Prompts and the responses sampled for them.

    prompt_ids_BP: int64, left-padded; prompt_mask_BP: bool.
    response_ids_BR: int64; the end-of-conversation token belongs to the response; pad after it.
    response_lengths_B: int64, from 1 to R.
    sampled_logprobs_BR: float32, log p of each drawn token at the sampling temperature, before bad words, top-k, top-p
        and min-p take any away; 0 outside the response.
    ended_B: bool, True where the end-of-conversation token was drawn or a stop string completed; the others are cut.
    seconds: what drawing them took on this rank, prompts included.
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    response_ids_BR: torch.Tensor
    response_lengths_B: torch.Tensor
    sampled_logprobs_BR: torch.Tensor
    ended_B: torch.Tensor
    seconds: float = 0.0

    @cached_property
    def response_mask_BR(self) -> torch.Tensor:
        """bool, True on response tokens; made from lengths, never from ids."""
        columns_R = torch.arange(self.response_ids_BR.shape[1], device=self.response_lengths_B.device)
        return columns_R < self.response_lengths_B.unsqueeze(1)

    def prompt_of(self, index: int) -> torch.Tensor:
        """int64 [prompt length], without padding."""
        return self.prompt_ids_BP[index][self.prompt_mask_BP[index]]

    def response_of(self, index: int) -> torch.Tensor:
        """int64 [response length], without padding."""
        return self.response_ids_BR[index, : int(self.response_lengths_B[index])]

    def sequences(self) -> list[TokenSequence]:
        """Prompt + response of each row, without padding, on the CPU; the response tokens are the targets."""
        return [
            join(self.prompt_of(index).cpu(), self.response_of(index).cpu())
            for index in range(len(self.response_lengths_B))
        ]

    def text_ids_of(self, index: int, end_token_id: int) -> torch.Tensor:
        """int64, what is decoded to the response's text: without the end-of-conversation token."""
        ids_r = self.response_of(index)
        return ids_r[:-1] if ids_r[-1] == end_token_id else ids_r

    def texts(self, decode: Callable[[torch.Tensor], Any], end_token_id: int) -> list[str]:
        """The responses as text, without the end-of-conversation token."""
        return [str(decode(self.text_ids_of(index, end_token_id))) for index in range(len(self.response_lengths_B))]


@dataclass(frozen=True)
class Scored:
    """float32 [B] each. scores_B: the weighted sum of the rewards. outcomes_B: what samples of a prompt compare, the
    scores with what lengths and ends take off. parts: each reward by its name, and what else a function gave as
    NAME/KEY; NaN where it gave none."""

    scores_B: torch.Tensor
    outcomes_B: torch.Tensor
    parts: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """rows: the prompts. rollout: their samples, those of a prompt adjacent. collect: waits for reward functions that
    are still at work; it is called once, by the first who reads `scored`."""

    rows: tuple[PromptRow, ...]
    rollout: Rollout
    collect: Callable[[], Scored]

    @cached_property
    def scored(self) -> Scored:
        return self.collect()


@dataclass(frozen=True)
class KeptForward:
    """A micro-batch that was read with its graph, so that learning need not read it again. numbers: of its sequences
    among all ranks' (`sequence_number`), in the order of the rows. values_M: the critic's; None without one."""

    numbers: Sequence[int]
    rows: TokenRows
    policy: TokenLogprobs
    values_M: torch.Tensor | None


def sequence_number(rank: int, index: int, samples_per_prompt: int, world_size: int) -> int:
    """The number among all ranks' sequences, whatever the number of ranks, of a rank's own one. Prompts are dealt to
    ranks one by one."""
    prompt, sample = divmod(index, samples_per_prompt)
    return (prompt * world_size + rank) * samples_per_prompt + sample


@dataclass(frozen=True)
class Experience:
    """A rollout with everything that learning needs. All [B, R] are float32 and 0 outside the response.

    scores_B: of the response, before what its length and end take off; reward_parts: of what it is the sum (Scored).
    counts_B: bool, False where the response is left out of the loss.
    rewards_BR: score at the last token; minus KL at each, where the KL is in the reward.
    advantages_BR: whitened over all ranks, where the estimator asks for it.
    old_logprobs_BR: of the actor that rolled out, by the training forward, at the sampling temperature; None where the
        update is exactly on-policy and nothing else reads them.
    ref_logprobs_BR: of the reference; None where no KL is wanted.
    values_BR: critic, in the state that chooses the token; returns_BR: advantages before whitening + values; both None
        without a critic.
    weights_BR: of the correction of the rollout's mismatch; None without.
    kept: this rank's forwards with their graphs, where learning uses them (--reuse_forwards).
    """

    rollout: Rollout
    scores_B: torch.Tensor
    counts_B: torch.Tensor
    rewards_BR: torch.Tensor
    advantages_BR: torch.Tensor
    old_logprobs_BR: torch.Tensor | None = None
    ref_logprobs_BR: torch.Tensor | None = None
    values_BR: torch.Tensor | None = None
    returns_BR: torch.Tensor | None = None
    weights_BR: torch.Tensor | None = None
    reward_parts: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: Sequence[KeptForward] = ()
