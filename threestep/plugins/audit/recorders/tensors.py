"""From watched micro-batches to the tensors of a record, for each kind of trainer.

N rows, T their tokens with padding, C tokens of completions. Preferences: N is two times the pairs, chosen first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from threestep.plugins.audit.recorders.micro_batch import Tensors, WatchedForward, WatchedMicroBatch, fit
from training.utils.base.errors import ThreestepError

_IGNORED = -100  # the label of tokens without loss


def _rows(ids_NT: torch.Tensor, real_NT: torch.Tensor, mask_NT: torch.Tensor) -> Tensors:
    count, width = ids_NT.shape
    return {
        "lengths": torch.full((count,), width),
        "token_ids": ids_NT.reshape(-1).long(),
        "is_real": real_NT.bool().reshape(-1),
        "loss_mask": mask_NT.bool().reshape(-1),
    }


def sft_tensors(batch: WatchedMicroBatch) -> Tensors:
    """Labelled tokens: transformers' Trainer and what stands on it."""
    inputs, own = batch.inputs, batch.own
    if "input_ids" not in inputs or "labels" not in inputs:
        raise ThreestepError(
            f"a record of sft needs input_ids and labels among the inputs of compute_loss, got {', '.join(inputs)}; "
            "other models cannot be recorded"
        )
    ids_NT, labels_NT = inputs["input_ids"], inputs["labels"]
    real_NT = inputs.get("attention_mask", torch.ones_like(ids_NT))
    given = own.mask_NT if own is not None else None
    mask_NT = functional.pad(labels_NT[:, 1:] != _IGNORED, (1, 0)) if given is None else given
    found = _rows(ids_NT, real_NT if real_NT.ndim == 2 else torch.ones_like(ids_NT), mask_NT)
    if own is not None and own.logprobs_NT is not None:
        found["logprobs"] = own.logprobs_NT.float().reshape(-1)
    return found


def _preferences(count: int) -> Tensors:
    pairs = count // 2
    return {"chosen": torch.arange(pairs), "rejected": torch.arange(pairs) + pairs}


def dpo_tensors(batch: WatchedMicroBatch) -> Tensors:
    """Pairs, which TRL 1.x has as rows and older releases as prompts and two responses."""
    if "prompt_input_ids" in batch.inputs:
        found = _of_three_columns(batch)
    else:
        found = _of_rows(batch)
    if batch.sums is not None:
        found["logprob_sums"] = batch.sums.float()
    given = [batch.inputs[name] for name in ("ref_chosen_logps", "ref_rejected_logps") if name in batch.inputs]
    ref_sums = torch.cat(given) if len(given) == 2 else batch.ref_sums
    if ref_sums is not None:
        found["ref_logprob_sums"] = ref_sums.float()
    return found


def _of_rows(batch: WatchedMicroBatch) -> Tensors:
    return _read_rows(batch) | _preferences(len(batch.inputs["input_ids"]))


def _read_rows(batch: WatchedMicroBatch) -> Tensors:
    """Rows of a prompt and a response, and both models' log-probabilities of them."""
    ids_NT = batch.inputs["input_ids"]
    data_NT = batch.inputs.get("completion_mask")
    if data_NT is None:
        data_NT = batch.inputs["labels"] != _IGNORED
    own, reference = batch.own, batch.without_graph(ids_NT, of_reference=True)
    mask_NT = data_NT if own is None or own.mask_NT is None else own.mask_NT
    found = _rows(ids_NT, batch.inputs["attention_mask"], mask_NT)
    found["data_mask"] = data_NT.bool().reshape(-1)
    for name, forward in (("logprobs", own), ("ref_logprobs", reference)):
        if forward is not None and forward.logprobs_NT is not None:
            found[name] = fit(forward.logprobs_NT, ids_NT.shape[1]).reshape(-1)
    return found


def _of_three_columns(batch: WatchedMicroBatch) -> Tensors:
    """Rows without their padding, before any cut; the loss mask are the responses' tokens that the forward had."""
    ids, lengths = [], []
    for side in ("chosen", "rejected"):
        for row in range(len(batch.inputs["prompt_input_ids"])):
            parts = [
                batch.inputs[f"{part}_input_ids"][row][batch.inputs[f"{part}_attention_mask"][row].bool()]
                for part in ("prompt", side)
            ]
            ids.append(torch.cat(parts))
            lengths.append(len(parts[1]))
    ids_NT = pad_sequence(ids, batch_first=True)
    place_T = torch.arange(ids_NT.shape[1])
    ends_N = torch.tensor([len(row) for row in ids]).unsqueeze(1)
    real_NT = place_T < ends_N
    data_NT = real_NT & (place_T >= ends_N - torch.tensor(lengths).unsqueeze(1))
    own = batch.own
    begin, width = (0, ids_NT.shape[1]) if own is None else _place(own, ids_NT, real_NT)
    kept_T = (place_T > begin) & (place_T < begin + width)
    found = _rows(ids_NT, real_NT, data_NT & kept_T) | _preferences(len(ids))
    found["data_mask"] = data_NT.reshape(-1)
    if own is not None and own.logprobs_NT is not None:
        logprobs_NT = torch.zeros(ids_NT.shape)
        logprobs_NT[:, begin : begin + width] = own.logprobs_NT.float()[:, :width]
        found["logprobs"] = torch.where(real_NT, logprobs_NT, 0.0).reshape(-1)
    return found


def _place(own: WatchedForward, ids_NT: torch.Tensor, real_NT: torch.Tensor) -> tuple[int, int]:
    """Return where the columns of the forward begin in the whole rows, and their number."""
    most = ids_NT.shape[1]
    width = min(own.ids_NT.shape[1], most)
    for begin in (0, most - width):
        real_Nt = real_NT[:, begin : begin + width]
        if torch.equal(own.ids_NT[:, :width][real_Nt], ids_NT[:, begin : begin + width][real_Nt]):
            return begin, width
    raise ThreestepError(
        "the forward pass of a DPO step must run on the rows passed to compute_loss, whole or truncated, but it ran on "
        "other rows"
    )


def marked_tensors(batch: WatchedMicroBatch) -> Tensors:
    """Responses that are marked one by one, and the same prompts with other rows' responses, by which KTO's point is
    found: TRL 1.x. The point is what the trainer logged of it."""
    inputs = batch.inputs
    wanted = ("input_ids", "attention_mask", "completion_mask", "label")
    if any(name not in inputs for name in wanted):
        raise ThreestepError(
            f"a record of KTO needs {', '.join(wanted)} among the inputs of compute_loss, got {', '.join(inputs)}; KTO "
            "in TRL before 1.0 has different inputs and cannot be recorded"
        )
    found = _read_rows(batch) | {"is_good": torch.as_tensor(inputs["label"]).bool()}
    if "ref_logps" in inputs:
        found["ref_logprob_sums"] = inputs["ref_logps"].float()
    if batch.point is not None and "KL_input_ids" in inputs:
        found["reference_points"] = torch.tensor([batch.point])
        sums = [_mismatched_sums(batch, of_reference) for of_reference in (False, True)]
        if sums[0] is not None and sums[1] is not None:
            found["mismatched_ratios"] = sums[0] - sums[1]
    return found


def _mismatched_sums(batch: WatchedMicroBatch, of_reference: bool) -> torch.Tensor | None:
    """Return [N], log-probabilities of other rows' responses; None where no forward had them."""
    inputs = batch.inputs
    if of_reference and "ref_KL_logps" in inputs:
        return inputs["ref_KL_logps"].float()
    forward = batch.without_graph(inputs["KL_input_ids"], of_reference)
    if forward is None or forward.logprobs_NT is None:
        return None
    logprobs_NT = fit(forward.logprobs_NT, inputs["KL_input_ids"].shape[1])
    return torch.where(inputs["KL_completion_mask"].bool(), logprobs_NT, 0.0).sum(dim=1)


def reward_tensors(batch: WatchedMicroBatch) -> Tensors:
    """Pairs of responses with a score each."""
    ids_NT = batch.inputs["input_ids"]
    found = _rows(ids_NT, batch.inputs["attention_mask"], torch.zeros_like(ids_NT)) | _preferences(len(ids_NT))
    del found["loss_mask"]
    if batch.own is not None and batch.own.scores_N is not None:
        found["scores"] = batch.own.scores_N.float()
    if "margin" in batch.inputs:
        found["margins"] = torch.as_tensor(batch.inputs["margin"]).float()
    return found


def policy_tensors(batch: WatchedMicroBatch) -> Tensors:
    """Drawn responses: GRPO, RLOO."""
    own = batch.inputs
    ids_NT, real_NT = (torch.cat([own[f"prompt_{what}"], own[f"completion_{what}"]], dim=1) for what in ("ids", "mask"))
    mask_NT = torch.cat([torch.zeros_like(own["prompt_mask"]), own["completion_mask"]], dim=1)
    found = {**_rows(ids_NT, real_NT, mask_NT), "data_mask": mask_NT.bool().reshape(-1)}
    columns = {
        "logprobs": None if batch.own is None else batch.own.logprobs_NT,
        "old_logprobs": own.get("old_per_token_logps"),
        "ref_logprobs": own.get("ref_per_token_logps"),
        "advantages": own["advantages"].unsqueeze(1) * own["completion_mask"],
    }
    for name, values in columns.items():
        if values is not None:
            found[name] = torch.where(mask_NT.bool(), fit(values, ids_NT.shape[1]), 0.0).reshape(-1)
    return found


# By the class of the trainer.
TENSORS: dict[str, Callable[[WatchedMicroBatch], Tensors]] = {
    "SFTTrainer": sft_tensors,
    "Trainer": sft_tensors,
    "DPOTrainer": dpo_tensors,
    "KTOTrainer": marked_tensors,
    "RewardTrainer": reward_tensors,
    "GRPOTrainer": policy_tensors,
    "RLOOTrainer": policy_tensors,
}
