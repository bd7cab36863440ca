"""Selection of the tokens of an optimizer step that KL-Cov and Clip-Cov treat apart.

M response tokens of a micro-batch, r of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from training.step3_ppo.experience.sequences import TokenColumns, TrainingSequence
from training.step3_ppo.losses.covariance import covariance_sums, covariances, smallest_selected_key, tokens_to_select
from training.utils.base.seeds import derived_seed
from training.utils.contracts.documents import first_alike

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import LearningSettings


@dataclass(frozen=True)
class Selected:
    """by_number: bool [r], True on selected tokens, by the sequence's number."""

    by_number: Mapping[int, torch.Tensor]

    def of_rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return selected_M of a micro-batch. numbers: of its sequences, in the order of the rows."""
        nothing = next(iter(self.by_number.values())).new_empty(0)
        return torch.cat([nothing, *(self.by_number[number] for number in numbers)])


def selected_tokens(
    sequences: Sequence[TrainingSequence],
    settings: LearningSettings,
    tokens: float,
    noise_seed: int,
    *,
    device: torch.device,
) -> Selected | None:
    """Select among the tokens that count; None for losses that treat none apart. Each sequence has its own noise.

    Sequences that are read alike are ranked by the old log-probabilities of the first of them: rounding, by which those
    of their forwards differ, would decide which of two equal tokens is selected.
    """
    if settings.policy_loss.keys is None:
        return None
    first = first_alike([sequence.tokens for sequence in sequences])
    olds = [sequences[place].old_logprobs_r for place in first]
    sequences = [replace(sequence, old_logprobs_r=old_r) for sequence, old_r in zip(sequences, olds, strict=True)]
    counted = TokenColumns([sequence for sequence in sequences if sequence.counts], device)
    assert counted.old_logprobs_M is not None  # reads_old_logprobs is True wherever tokens are selected
    sums = covariance_sums(counted.advantages_M, counted.old_logprobs_M)
    keys = []
    for sequence in sequences:
        assert sequence.old_logprobs_r is not None
        generator = torch.Generator().manual_seed(derived_seed(noise_seed, sequence.number))
        noise_r = torch.rand(len(sequence.advantages_r), generator=generator, dtype=torch.float64).to(device)
        covariance_r = covariances(sequence.advantages_r, sequence.old_logprobs_r, sums)
        keys.append(settings.policy_loss.keys(covariance_r, noise_r, settings.clip_cov_low, settings.clip_cov_high))
    nothing = torch.empty(0, dtype=torch.float64, device=device)
    those = torch.cat([nothing, *(key_r for key_r, sequence in zip(keys, sequences, strict=True) if sequence.counts)])
    bound = smallest_selected_key(those, tokens_to_select(settings.cov_share, tokens))
    return Selected({sequence.number: key_r >= bound for key_r, sequence in zip(keys, sequences, strict=True)})
