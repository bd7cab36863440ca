"""The rollouts of TRL's GRPOTrainer and RLOOTrainer, as they are watched: scores, advantages, log-probabilities.

B responses of this process, C tokens of completions with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from threestep.plugins.audit.recorders.micro_batch import Tensors, WatchedMicroBatch, copied

_COLUMNS = {
    "rollout_old_logprobs": "old_per_token_logps",
    "rollout_ref_logprobs": "ref_per_token_logps",
    "rollout_sampling_logprobs": "sampling_per_token_logps",
}


class Rollouts:
    """Generations since the last update before one: several, where each micro-batch is drawn by itself."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._made, self._is_used = trainer, list[Tensors](), False
        self._scores: list[torch.Tensor] = []
        self._logprobs: list[tuple[bool, torch.Tensor]] = []

    def wrappers(self) -> dict[str, Callable[..., Any]]:
        """By the name of the method that each is put around."""
        found: dict[str, Callable[..., Any]] = {"_generate_and_score_completions": self._roll_out}
        for name, wrapper in (
            ("_calculate_rewards", self._score),
            ("_get_per_token_logps_and_entropies", self._read),
        ):
            if hasattr(self._trainer, name):
                found[name] = wrapper
        return found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Older trainers have no method that scores: there the list of reward functions is replaced by one that keeps
        what they return, and put back."""
        if hasattr(self._trainer, "_calculate_rewards") or int(self._trainer.accelerator.num_processes) > 1:
            yield
            return
        before = self._trainer.reward_funcs
        self._trainer.reward_funcs = [self._keeping(function) for function in before]
        try:
            yield
        finally:
            self._trainer.reward_funcs = before

    def _keeping(self, function: Any) -> Any:
        if isinstance(function, torch.nn.Module):
            return function

        def kept(*args: Any, **more: Any) -> Any:
            scores = function(*args, **more)
            self._scores.append(torch.tensor([float("nan") if one is None else float(one) for one in scores]))
            return scores

        kept.__name__ = getattr(function, "__name__", "reward")
        return kept

    def _score(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        scores = original(*args, **more)
        self._scores = [scores[:, place].cpu() for place in range(scores.shape[1])]
        return scores

    def _read(self, original: Callable[..., Any], model: Any, *args: Any, **more: Any) -> Any:
        found = original(model, *args, **more)
        if not torch.is_grad_enabled():
            self._logprobs.append((model is self._trainer.model, copied(found[0])))
        return found

    def _roll_out(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._scores, self._logprobs = [], []
        made = original(*args, **more)
        if not self._trainer.model.training:
            return made
        if self._is_used:
            self._made, self._is_used = [], False
        own = {name: copied(value) for name, value in made.items() if isinstance(value, torch.Tensor)}
        if "old_logps" in own:  # RLOO: the sum of each response, made of these
            for is_policy, logprobs_BC in self._logprobs:
                own.setdefault("old_per_token_logps" if is_policy else "ref_per_token_logps", logprobs_BC)
        if len(self._scores) == len(self._trainer.reward_weights):
            weights = self._trainer.reward_weights.cpu()
            scores = (torch.stack(self._scores, dim=1) * weights).nansum(dim=1)
            count = len(own["completion_ids"])
            first = int(self._trainer.accelerator.process_index) * count if len(scores) > count else 0
            own["score"] = scores[first : first + count]
        self._made.append(own)
        return made

    def mark_used(self) -> None:
        """The step is recorded: the next generation is of another."""
        self._is_used = True

    def fill(self, batch: WatchedMicroBatch) -> None:
        """Give RLOO's micro-batch the old log-probabilities of its tokens: those of the rollout, but for the sum, which
        is the one that the loss was given."""
        inputs = batch.inputs
        if "old_logps" not in inputs or not self._made or "old_per_token_logps" not in self._made[-1]:
            return
        rows = []
        for row, (made, place) in enumerate(self._places([batch])):
            width = inputs["completion_ids"].shape[1]
            counts_C = inputs["completion_mask"][row].bool()
            own_C = torch.where(counts_C, made["old_per_token_logps"][place][:width], 0.0)
            own_C[0] += inputs["old_logps"][row] - own_C.sum()
            rows.append(own_C)
        inputs["old_per_token_logps"] = torch.stack(rows)

    def _places(self, batches: list[WatchedMicroBatch]) -> list[tuple[Tensors, int]]:
        """Return of each row the generation and its place in it. Equal responses are taken in their order."""
        waiting: dict[bytes, list[tuple[Tensors, int]]] = {}
        for made in self._made:
            for place in range(len(made["completion_ids"])):
                waiting.setdefault(_key(made, place), []).append((made, place))
        found = []
        for batch in batches:
            for row in range(len(batch.inputs["completion_ids"])):
                own = waiting.get(_key(batch.inputs, row), [(self._made[0], 0)])
                found.append(own.pop(0) if len(own) > 1 else own[0])
        return found

    def tensors(self, batches: list[WatchedMicroBatch]) -> Tensors:
        """The rollout of this process, and the number in it of each row of the step."""
        if not self._made:
            return {}
        accelerator, begin = self._trainer.accelerator, 0
        first: dict[int, int] = {}
        for made in self._made:  # numbers of all processes: generation after generation
            count = len(made["completion_ids"])
            first[id(made)] = begin + int(accelerator.process_index) * count
            begin += count * int(accelerator.num_processes)
        masks = [made["completion_mask"].bool() for made in self._made]
        numbers = torch.cat([torch.arange(len(mask)) + first[id(made)] for made, mask in self._each(masks)])
        lengths = torch.cat([mask.sum(dim=1) for mask in masks])
        found = {
            "numbers": torch.tensor([first[id(made)] + place for made, place in self._places(batches)]),
            "rollout_numbers": numbers,
            "rollout_groups": numbers // int(self._trainer.num_generations),
            "rollout_lengths": lengths,
            "rollout_advantages": torch.cat([made["advantages"] for made in self._made])
            .float()
            .repeat_interleave(lengths),
        }
        if all("score" in made for made in self._made):
            found["rollout_scores"] = torch.cat([made["score"] for made in self._made]).float()
        for name, theirs in _COLUMNS.items():
            if all(made.get(theirs) is not None for made in self._made):
                found[name] = torch.cat([made[theirs].float()[mask] for made, mask in self._each(masks)])
        return found

    def _each(self, masks: list[torch.Tensor]) -> Iterator[tuple[Tensors, torch.Tensor]]:
        return zip(self._made, masks, strict=True)


def _key(batch: Any, row: int) -> bytes:
    """A row's prompt and completion, without padding."""
    ids = [batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")]
    return b"|".join(one.cpu().numpy().tobytes() for one in ids)
