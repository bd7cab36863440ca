"""The check that tokens which are verified together have the log-probabilities that the model itself computes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from threestep.plugins.speculation.kept_rows import KeptRows
from training.utils.generation.decoding.decode_check import SAMPLES, request_of, why_not_read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from training.utils.generation.decoding.decode_check import ProbeCase
    from training.utils.models.own_forward import OwnForward


def why_not_verified(model: PreTrainedModel, own: OwnForward, guesses: int) -> str | None:
    """Return None if log-probabilities of tokens that are given with `guesses` others behind them, some of which are
    wrong and taken back (`KeptRows`), are those of `own`, else the reason why not."""
    return why_not_read(own, partial(_verified, model, guesses=guesses))


def _verified(model: PreTrainedModel, cases: Sequence[ProbeCase], guesses: int) -> list[list[torch.Tensor]]:
    """Return, for each case, the log-probabilities (float64) of its response's tokens. The guesses of every second row
    are wrong, in turns, and taken back."""
    request = request_of(cases, model.device)
    ids_BP, mask_BP, rounds = request.prompt_ids_BP, request.prompt_mask_BP, request.sampling.max_new_tokens
    trunk, layer = cast("PreTrainedModel", model.base_model), cast("Any", model.get_output_embeddings())
    rows = KeptRows(trunk, mask_BP, ids_BP.shape[1] + rounds * (guesses + 1))
    states_BPH = rows.prefill((mask_BP.long().cumsum(-1) - 1).clamp(min=0), input_ids=ids_BP)
    order_A = torch.arange(len(ids_BP), device=ids_BP.device).repeat_interleave(SAMPLES)
    rows.repeat(order_A)
    states_AQH, kept = states_BPH[order_A, -1:], [1] * len(cases)
    # What follows a response may be any token.
    wanted = [[*case.response_ids, *[case.response_ids[-1]] * (rounds * (guesses + 1))] for case in cases]
    read: list[list[torch.Tensor]] = [[] for _ in cases]
    for turn in range(rounds):
        logprobs_AQV, given = torch.log_softmax(layer(states_AQH).double(), dim=-1), []
        for row, ids in enumerate(wanted):
            first = len(read[row])
            read[row] += [logprobs_AQV[row, place, ids[first + place]] for place in range(kept[row])]
            last, *right = ids[len(read[row]) - 1 :][: guesses + 1]
            is_right = (row + turn) % 2 == 0
            given.append([last, *(right if is_right else [int(cases[row].prompt_ids_P[0])] * guesses)])
            kept[row] = guesses + 1 if is_right else 1
        states_AQH = rows.give(guesses + 1, input_ids=torch.tensor(given, device=ids_BP.device))
        rows.keep(torch.tensor(kept, device=ids_BP.device), max(kept))
    return [found[: len(case.response_ids)] for found, case in zip(read, cases, strict=True)]
