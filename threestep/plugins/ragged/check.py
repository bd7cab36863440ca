"""Log-probabilities of tokens that ragged rows are given, compared with a model's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from threestep.plugins.ragged.ragged_rows import RaggedRows
from training.utils.generation.decoding.decode_check import why_not_read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.media import RunMedia
    from training.utils.generation.decoding.decode_check import ProbeCase
    from training.utils.models.own_forward import OwnForward


def why_not_in_turns(model: PreTrainedModel, own: OwnForward, fixed: bool) -> str | None:
    """Return None if log-probabilities of tokens that are given one by one and several at once, each behind what its
    row holds (`RaggedRows`), are those of `own`, else the reason why not."""
    return why_not_read(own, partial(_in_turns, model, fixed=fixed))


def why_no_media_in_turns(model: PreTrainedModel, own: OwnForward) -> str | None:
    """Return None if log-probabilities of tokens that are given so behind prompts with media (`RaggedRows.begin`) are
    those of `own`, else the reason why not."""
    assert own.with_media is not None, "it was loaded with media"
    return why_not_read(own, partial(_in_turns, model, fixed=False, media=own.with_media.media), of_media=True)


def _in_turns(
    model: PreTrainedModel, cases: Sequence[ProbeCase], fixed: bool, media: RunMedia | None = None
) -> list[list[torch.Tensor]]:
    """Return what `_decoded` does. Every second token is given with the two before it, which are computed again."""
    rows = RaggedRows(model, fixed)
    rows.add(len(cases))
    of_prompts = [None if media is None else media.of_prompts([case.media]) for case in cases]
    logits_AV = rows.begin(0, [case.prompt_ids_P.tolist() for case in cases], of_prompts)
    most = max(len(case.response_ids) for case in cases)
    # What follows a response may be any token.
    wanted = [[*case.response_ids, *[case.response_ids[-1]] * (most - len(case.response_ids))] for case in cases]
    read: list[list[torch.Tensor]] = [[] for _ in cases]
    for place in range(most):
        token_A = torch.tensor([ids[place] for ids in wanted], device=logits_AV.device)
        logprobs_AV = torch.log_softmax(logits_AV.double(), dim=-1)
        for found, logprob in zip(read, logprobs_AV.gather(-1, token_A.unsqueeze(1)).squeeze(1), strict=True):
            found.append(logprob)
        if place % 2:
            # One row less of these tokens than the next has: chunks of different lengths.
            again = [min(place, 2 - row % 2) for row in range(len(cases))]
            rows.filled = [filled - count for filled, count in zip(rows.filled, again, strict=True)]
            given = [ids[place - count : place + 1] for ids, count in zip(wanted, again, strict=True)]
            logits_AV = rows.give(0, given)
        else:
            logits_AV = rows.append(token_A.tolist(), rows.positions)
    return [found[: len(case.response_ids)] for found, case in zip(read, cases, strict=True)]
