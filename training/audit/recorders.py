"""Records of other trainers: TRL's SFTTrainer, DPOTrainer and GRPOTrainer, watched from outside. Serves users' scripts:

    with training.audit.recorded(trainer, "record/"):
        trainer.train()

Nothing of their installation is changed: methods are wrapped on the one trainer, and put back at the end.

N rows of a micro-batch, T their tokens with padding, C tokens of completions.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from training.audit.recorded_settings import settings_of
from training.utils.base.errors import ThreestepError
from training.utils.recording.files import RecordHead, check_tensors, rank_file, write_head, write_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy as np

MOST_WEIGHTS = 5_000_000  # of a model whose gradients and weights are recorded
_OBJECTIVES = {"SFTTrainer": "sft", "DPOTrainer": "dpo", "GRPOTrainer": "policy"}
_Tensors = dict[str, torch.Tensor]


@contextlib.contextmanager
def recorded(trainer: Any, folder: str | Path, steps: Collection[int] = (1,)) -> Iterator[None]:
    """Inside, `trainer.train()` writes records of these optimizer steps to `folder`/step_000001 and so on.

    trainer: TRL's SFTTrainer, DPOTrainer or GRPOTrainer, or a class made of one. ThreestepError for others.
    """
    names = [kind.__name__ for kind in type(trainer).__mro__]
    objective = next((_OBJECTIVES[name] for name in names if name in _OBJECTIVES), None)
    if objective is None:
        raise ThreestepError(
            f"recorded expects one of TRL's {', '.join(_OBJECTIVES)}, got {names[0]}; other trainers write records by "
            "the schema of docs/audit.md"
        )
    watch = _Watch(trainer, Path(folder), frozenset(steps), objective)
    with watch.installed():
        yield


@dataclass
class _MicroBatch:
    """inputs: as compute_loss was given them. logprobs_NT, ref_logprobs_NT: float, of each token; None where not read.
    mask_NT: bool, tokens whose log-probabilities count. loss: that training_step returned."""

    inputs: dict[str, Any]
    items: float | None
    logprobs_NT: torch.Tensor | None = None
    mask_NT: torch.Tensor | None = None
    ref_logprobs_NT: torch.Tensor | None = None
    loss: float = float("nan")


@dataclass
class _Watch:
    trainer: Any
    folder: Path
    steps: frozenset[int]
    objective: str
    batches: list[_MicroBatch] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    updates: float = 0.0
    rollout: list[tuple[bytes, dict[str, torch.Tensor]]] = field(default_factory=list)
    _rewards: torch.Tensor | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the trainer's methods; inside, they write records."""
        trainer = self.trainer
        wrappers: dict[str, Callable[..., Any]] = {
            "compute_loss": self._compute_loss,
            "training_step": self._training_step,
            "_clip_grad_norm": self._clip,
        }
        if self.objective == "policy":
            wrappers |= {"_calculate_rewards": self._score, "_generate_and_score_completions": self._roll_out}
        for name, wrapper in wrappers.items():
            setattr(trainer, name, _around(getattr(trainer, name), wrapper))
        models = [(trainer.model, self._read), (getattr(trainer, "ref_model", None), self._read_reference)]
        hooks = [model.register_forward_hook(hook) for model, hook in models if model is not None]
        callback = _callback(self)
        trainer.add_callback(callback)
        try:
            yield
        finally:
            trainer.remove_callback(callback)
            for hook in hooks:
                hook.remove()
            for name in wrappers:
                delattr(trainer, name)

    @property
    def is_on(self) -> bool:
        return self.trainer.state.global_step + 1 in self.steps and self.trainer.model.training

    # --- what the trainer calls

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if self.is_on:
            copied = {name: _copied(value) for name, value in inputs.items()}
            items = more.get("num_items_in_batch", copied.get("num_items_in_batch"))
            self.batches.append(_MicroBatch(copied, None if items is None else float(items)))
        return original(model, inputs, *args, **more)

    def _training_step(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        begun = len(self.batches)
        loss = original(*args, **more)
        if len(self.batches) > begun:
            self.batches[-1].loss = float(loss)
        return loss

    def _read(self, model: Any, given: Any, output: Any) -> None:
        """Keep the log-probabilities of a forward with a graph."""
        if self.batches and torch.is_grad_enabled() and getattr(output, "log_probs", None) is not None:
            self.batches[-1].logprobs_NT = _at_tokens(output.log_probs)
            mask = getattr(output, "label_mask", None)
            self.batches[-1].mask_NT = None if mask is None else _at_tokens(mask).bool()

    def _read_reference(self, model: Any, given: Any, output: Any) -> None:
        if self.batches and self.batches[-1].ref_logprobs_NT is None and getattr(output, "log_probs", None) is not None:
            self.batches[-1].ref_logprobs_NT = _at_tokens(output.log_probs)

    def _clip(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if not self.is_on:
            return original(*args, **more)
        self._keep("gradients.", lambda weight: weight.grad)
        norm = original(*args, **more)
        self._keep("clipped_gradients.", lambda weight: weight.grad)
        if norm is not None:
            self.figures["grad_norm"] = float(norm)
        return norm

    def _score(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self._rewards = original(*args, **more)
        return self._rewards

    def _roll_out(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = original(*args, **more)
        if self.trainer.model.training and self._rewards is not None:
            weights = self.trainer.reward_weights.to(self._rewards.device)
            scores = (self._rewards * weights).nansum(dim=1).cpu()
            self.rollout = [
                (_key(made, row), {"score": scores[self._first(made) + row], "advantage": made["advantages"][row].cpu(),
                                   "length": made["completion_mask"][row].sum().cpu()})
                for row in range(len(made["completion_ids"]))
            ]  # fmt: skip
        return made

    def _first(self, made: Any) -> int:
        """The place of this process's rows among all processes'."""
        return int(self.trainer.accelerator.process_index) * len(made["completion_ids"])

    def before_update(self) -> None:
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        self.figures["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        history = next((state for state in optimizer.state.values() if "step" in state), None)
        self.updates = 0.0 if history is None else float(history["step"])
        self._keep("weights_before.", lambda weight: weight)
        for name in ("exp_avg", "exp_avg_sq"):
            self._keep(f"{name}.", partial(_moment, optimizer, name))

    def after_update(self) -> None:
        self._keep("weights_after.", lambda weight: weight)
        self._write()
        self.batches, self.state, self.figures = [], {}, {}

    def _keep(self, kind: str, of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Copy a tensor of each trained weight, of small models."""
        trained = [(name, weight) for name, weight in self.trainer.model.named_parameters() if weight.requires_grad]
        if sum(weight.numel() for _, weight in trained) > MOST_WEIGHTS:
            return
        for name, weight in trained:
            value = of(weight)
            value = torch.zeros_like(weight) if value is None else value
            self.state[kind + name] = value.detach().float().cpu().numpy().copy()

    # --- the record

    def _write(self) -> None:
        accelerator, step = self.trainer.accelerator, self.trainer.state.global_step + 1
        folder, rank = self.folder / f"step_{step:06}", int(accelerator.process_index)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: values.numpy() for name, values in self._tensors().items()}
        check_tensors(tensors, rank_file(rank))
        write_rank(folder, rank, tensors)
        loss = torch.tensor([sum(batch.loss for batch in self.batches)], device=accelerator.device)
        self.figures["loss"] = float(accelerator.gather(loss).mean())
        if self.objective == "sft" and self.batches[0].items is not None:
            self.figures["denominator"] = self.batches[0].items
        settings = {**settings_of(self.trainer, self.objective), "updates_before": self.updates}
        if accelerator.is_main_process:
            ranks = int(accelerator.num_processes)
            head = RecordHead(
                self.objective, step, ranks, settings, self.figures, {"name": "trl", "version": _version()}
            )
            write_head(folder, head, self.state)

    def _tensors(self) -> _Tensors:
        parts: list[_Tensors] = []
        begin = 0
        for number, batch in enumerate(self.batches):
            own = {"sft": _sft_tensors, "dpo": _dpo_tensors, "policy": _policy_tensors}[self.objective](batch)
            rows = len(own["lengths"])
            own["micro_batches"] = torch.full((rows,), number)
            own["micro_losses"] = torch.tensor([batch.loss])
            for name in ("chosen", "rejected"):
                if name in own:
                    own[name] = own[name] + begin
            begin += rows
            parts.append(own)
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return found | (self._rollout_tensors() if self.objective == "policy" else {})

    def _rollout_tensors(self) -> _Tensors:
        """The rollout of this process, and the number in it of each row of the step."""
        if not self.rollout:
            return {}
        waiting: dict[bytes, list[int]] = {}
        for place, (key, _) in enumerate(self.rollout):
            waiting.setdefault(key, []).append(place)
        first = int(self.trainer.accelerator.process_index) * len(self.rollout)
        places = []
        for batch in self.batches:
            for row in range(len(batch.inputs["completion_ids"])):
                own = waiting.get(_key(batch.inputs, row), [0])
                places.append(own.pop(0) if len(own) > 1 else own[0])
        rows = [row for _, row in self.rollout]
        lengths = torch.stack([row["length"] for row in rows]).long()
        numbers = torch.arange(len(rows)) + first
        return {
            "numbers": torch.tensor(places) + first,
            "rollout_numbers": numbers,
            "rollout_groups": numbers // int(self.trainer.num_generations),
            "rollout_lengths": lengths,
            "rollout_scores": torch.stack([row["score"] for row in rows]).float(),
            "rollout_advantages": torch.stack([row["advantage"] for row in rows]).float().repeat_interleave(lengths),
        }


def _moment(optimizer: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Adam's moment of a weight; 0 before its first update."""
    return optimizer.state[weight].get(name, torch.zeros_like(weight)) if weight in optimizer.state else weight * 0


def _around(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **more: wrapper(original, *args, **more)


def _callback(watch: _Watch) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if watch.batches:
                watch.before_update()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if watch.batches:
                watch.after_update()

    return Callback()


def _version() -> str:
    """TRL's; "" where it is not installed, as for a trainer that stands for one of its."""
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return ""


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _at_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return [N, T] from [N, T - 1] of the places that predict: each number at its token."""
    return functional.pad(values.detach().cpu(), (1, 0))


def _key(batch: Any, row: int) -> bytes:
    """A row's prompt and completion, without padding."""
    ids = [batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")]
    return b"|".join(one.cpu().numpy().tobytes() for one in ids)


def _rows(ids_NT: torch.Tensor, real_NT: torch.Tensor, mask_NT: torch.Tensor) -> _Tensors:
    count, width = ids_NT.shape
    return {
        "lengths": torch.full((count,), width),
        "token_ids": ids_NT.reshape(-1),
        "is_real": real_NT.bool().reshape(-1),
        "loss_mask": mask_NT.bool().reshape(-1),
    }


def _fit(values_NT: torch.Tensor, width: int) -> torch.Tensor:
    """Return [N, width], from rows that end as these do."""
    return functional.pad(values_NT, (max(0, width - values_NT.shape[1]), 0))[:, -width:].float()


def _sft_tensors(batch: _MicroBatch) -> _Tensors:
    ids_NT, labels_NT = batch.inputs["input_ids"], batch.inputs["labels"]
    real_NT = batch.inputs.get("attention_mask", torch.ones_like(ids_NT))
    mask_NT = functional.pad(labels_NT[:, 1:] != -100, (1, 0)) if batch.mask_NT is None else batch.mask_NT
    found = _rows(ids_NT, real_NT, mask_NT)
    if batch.logprobs_NT is not None:
        found["logprobs"] = batch.logprobs_NT.float().reshape(-1)
    return found


def _dpo_tensors(batch: _MicroBatch) -> _Tensors:
    """Chosen responses come first, then the rejected ones."""
    ids_NT, mask_NT = batch.inputs["input_ids"], batch.inputs["completion_mask"]
    pairs = len(ids_NT) // 2
    found = _rows(ids_NT, batch.inputs["attention_mask"], mask_NT if batch.mask_NT is None else batch.mask_NT)
    found |= {
        "chosen": torch.arange(pairs),
        "rejected": torch.arange(pairs) + pairs,
        "data_mask": mask_NT.bool().reshape(-1),
    }
    for name, values in (("logprobs", batch.logprobs_NT), ("ref_logprobs", batch.ref_logprobs_NT)):
        if values is not None:
            found[name] = _fit(values, ids_NT.shape[1]).reshape(-1)
    if "ref_chosen_logps" in batch.inputs:
        sides = [batch.inputs[f"ref_{side}_logps"] for side in ("chosen", "rejected")]
        found["ref_logprob_sums"] = torch.cat(sides).float()
    return found


def _policy_tensors(batch: _MicroBatch) -> _Tensors:
    own = batch.inputs
    parts = [torch.cat([own[f"prompt_{what}"], own[f"completion_{what}"]], dim=1) for what in ("ids", "mask")]
    ids_NT, real_NT = parts
    mask_NT = torch.cat([torch.zeros_like(own["prompt_mask"]), own["completion_mask"]], dim=1)
    found = {**_rows(ids_NT, real_NT, mask_NT), "data_mask": mask_NT.bool().reshape(-1)}
    width = ids_NT.shape[1]
    columns = {
        "logprobs": batch.logprobs_NT,
        "old_logprobs": own.get("old_per_token_logps"),
        "ref_logprobs": own.get("ref_per_token_logps"),
        "advantages": own["advantages"].unsqueeze(1) * own["completion_mask"],
    }
    for name, values in columns.items():
        if values is not None:
            found[name] = torch.where(mask_NT.bool(), _fit(values, width), 0.0).reshape(-1)
    return found
