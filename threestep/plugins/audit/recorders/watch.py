"""Records of other trainers: TRL's, transformers' Trainer and what is made of it. Serves users' scripts:

    with threestep.audit.recorded(trainer, "record/"):
        trainer.train()

Nothing of their installation is changed: methods are wrapped on the one trainer, and put back at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.audit.recorders.micro_batch import Tensors, WatchedMicroBatch, copied, read_forward
from threestep.plugins.audit.recorders.rollouts import Rollouts
from threestep.plugins.audit.recorders.settings import OBJECTIVES, settings_of, version_of
from threestep.plugins.audit.recorders.tensors import TENSORS
from threestep.plugins.audit.recording.files import RecordHead, check_tensors, rank_file, write_head, write_rank
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    import numpy as np

MOST_WEIGHTS = 5_000_000  # of a model whose gradients and weights are recorded


@contextlib.contextmanager
def recorded(trainer: Any, folder: str | Path, steps: Collection[int] = (1,)) -> Iterator[None]:
    """Inside, `trainer.train()` writes records of these optimizer steps to `folder`/step_000001 and so on.

    trainer: TRL's for SFT, rewards, DPO, KTO, GRPO or RLOO, transformers' Trainer, or of a class made of one;
    ThreestepError for others. Or such a class itself, where a program makes the trainer: each that trains inside is
    recorded.
    """
    if isinstance(trainer, type):
        with _wrapped(trainer, {"train": _recording(folder, steps)}):
            yield
        return
    watch = _Watch(trainer, Path(folder), frozenset(steps), _kind_of(trainer))
    with watch.installed():
        yield


def _recording(folder: str | Path, steps: Collection[int]) -> Callable[..., Any]:
    def train(original: Callable[..., Any], trainer: Any, *args: Any, **more: Any) -> Any:
        with recorded(trainer, folder, steps):
            return original(trainer, *args, **more)

    return train


def _kind_of(trainer: Any) -> str:
    for kind in type(trainer).__mro__:
        if kind.__name__ in OBJECTIVES:
            return kind.__name__
        if kind.__module__.startswith("trl.") and "Base" not in kind.__name__:
            break  # TRL's for another loss
    raise ThreestepError(
        f"recorded expects one of {', '.join(OBJECTIVES)} from TRL or transformers, or a subclass of one, got "
        f"{type(trainer).__name__}; for other trainers, write records in the format of "
        "threestep/plugins/audit/README.md"
    )


@dataclass
class _Watch:
    trainer: Any
    folder: Path
    steps: frozenset[int]
    kind: str
    batches: list[WatchedMicroBatch] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    updates: float = 0.0
    computes: bool = False  # a loss, and does not generate
    rollouts: Rollouts = field(init=False)

    def __post_init__(self) -> None:
        self.rollouts = Rollouts(self.trainer)

    @property
    def objective(self) -> str:
        return OBJECTIVES[self.kind]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the trainer's methods; inside, they write records."""
        trainer = self.trainer
        callback = _callback(self)
        with contextlib.ExitStack() as stack:
            for owner, wrappers in self._wrappers():
                stack.enter_context(_wrapped(owner, wrappers))
            if self.objective == "policy":
                stack.enter_context(self.rollouts.installed())
            for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
                stack.callback(model.register_forward_hook(self._read, with_kwargs=True).remove)
            trainer.add_callback(callback)
            stack.callback(trainer.remove_callback, callback)
            yield

    def _wrappers(self) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
        own: dict[str, Callable[..., Any]] = {
            "compute_loss": self._compute_loss,
            "training_step": self._training_step,
        }
        if hasattr(self.trainer, "concatenated_forward"):
            own["concatenated_forward"] = self._read_sums
        if self.objective == "policy":
            own |= self.rollouts.wrappers()
        accelerate: dict[str, Callable[..., Any]] = {"backward": self._backward}
        if hasattr(self.trainer, "_clip_grad_norm"):
            own["_clip_grad_norm"] = self._clip
        else:
            accelerate["clip_grad_norm_"] = self._clip
        return [(self.trainer, own), (self.trainer.accelerator, accelerate)]

    @property
    def is_on(self) -> bool:
        return self.trainer.state.global_step + 1 in self.steps and self.trainer.model.training

    # --- what the trainer calls

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if self.is_on:
            own = {name: copied(value) for name, value in inputs.items()}
            items = more.get("num_items_in_batch", own.get("num_items_in_batch"))
            self.batches.append(WatchedMicroBatch(own, None if items is None else float(items)))
        self.computes = self.is_on
        try:
            return original(model, inputs, *args, **more)
        finally:
            self.computes = False
            if self.is_on:
                self.batches[-1].point = logged_point(self.trainer)

    def _training_step(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        begun = len(self.batches)
        loss = original(*args, **more)
        if len(self.batches) > begun:
            self.batches[-1].loss = float(loss)
        return loss

    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **more: Any) -> Any:
        if self.batches:  # accelerate divides, if it accumulates
            parts = float(getattr(self.trainer.accelerator, "gradient_accumulation_steps", 1))
            self.batches[-1].backward_loss = float(loss.detach()) / parts
        return original(loss, *args, **more)

    def _read(self, model: Any, args: Any, given: Any, output: Any) -> None:
        if not self.computes:
            return
        of_reference = model is not self.trainer.model
        temperature = float(self.trainer.args.temperature) if self.objective == "policy" else 1.0
        forward = read_forward(args, given, output, of_reference=of_reference, temperature=temperature)
        if forward is not None:
            self.batches[-1].forwards.append(forward)

    def _read_sums(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        if self.batches:
            names = ("chosen_logps", "rejected_logps")
            sides = [found[name] for name in names] if isinstance(found, dict) else found[:2]
            name = "sums" if sides[0].requires_grad else "ref_sums"
            setattr(self.batches[-1], name, copied(torch.cat(list(sides))))
        return found

    def _clip(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if not self.is_on:
            return original(*args, **more)
        self._keep("gradients.", lambda weight: weight.grad)
        norm = original(*args, **more)
        self._keep("clipped_gradients.", lambda weight: weight.grad)
        if norm is not None:
            self.figures["grad_norm"] = float(norm)
        return norm

    def before_update(self) -> None:
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        self.figures["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        history = next((state for state in optimizer.state.values() if "step" in state), None)
        self.updates = 0.0 if history is None else float(history["step"])
        self._keep("weights_before.", lambda weight: weight)
        for name in ("exp_avg", "exp_avg_sq"):
            self._keep(f"{name}.", partial(_moment, optimizer, name))

    def after_update(self) -> None:
        if self.batches:
            self._keep("weights_after.", lambda weight: weight)
            self._write()
            self.batches, self.state, self.figures = [], {}, {}
        self.rollouts.mark_used()

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
        sums = [sum(batch.loss for batch in self.batches), sum(batch.backward_loss for batch in self.batches)]
        means = accelerator.gather(torch.tensor([sums], device=accelerator.device)).mean(dim=0).tolist()
        self.figures |= {"loss": means[0], "backward_loss": means[1]}
        if self.objective == "sft" and self.batches[0].items is not None:
            self.figures["denominator"] = self.batches[0].items
        settings = {**settings_of(self.trainer, self.kind), "updates_before": self.updates}
        if "margins" in tensors:
            settings["margin_scale"] = 1.0
        if accelerator.is_main_process:
            package = "transformers" if self.kind == "Trainer" else "trl"
            trainer = {"name": f"{package} {type(self.trainer).__name__}", "version": version_of(package)}
            head = RecordHead(self.objective, step, int(accelerator.num_processes), settings, self.figures, trainer)
            write_head(folder, head, self.state)

    def _tensors(self) -> Tensors:
        parts: list[Tensors] = []
        begin = 0
        for number, batch in enumerate(self.batches):
            self.rollouts.fill(batch)
            own = TENSORS[self.kind](batch)
            rows = len(own["lengths"])
            own["micro_batches"] = torch.full((rows,), number)
            own["micro_losses"] = torch.tensor([batch.loss])
            for name in ("chosen", "rejected"):
                if name in own:
                    own[name] = own[name] + begin
            begin += rows
            parts.append(own)
        shared = [name for name in parts[0] if all(name in part for part in parts)]
        found = {name: torch.cat([part[name] for part in parts]) for name in shared}
        return found | (self.rollouts.tensors(self.batches) if self.objective == "policy" else {})


def logged_point(trainer: Any) -> float | None:
    """KTO's reference point of the last micro-batch, which TRL logs as `kl`; None of another trainer."""
    logged = getattr(trainer, "_metrics", {}).get("train", {}).get("kl")
    return float(logged[-1]) if logged else None


def _moment(optimizer: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Adam's moment of a weight; 0 before its first update."""
    return optimizer.state[weight].get(name, torch.zeros_like(weight)) if weight in optimizer.state else weight * 0


@contextlib.contextmanager
def _wrapped(owner: Any, wrappers: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, these methods of the object are wrapped; what it had of its own is put back."""
    before = {name: vars(owner)[name] for name in wrappers if name in vars(owner)}
    for name, wrapper in wrappers.items():
        setattr(owner, name, _around(getattr(owner, name), wrapper))
    try:
        yield
    finally:
        for name in wrappers:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


def _around(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)  # trainers look at the parameters of their methods
    def wrapped(*args: Any, **more: Any) -> Any:
        return wrapper(original, *args, **more)

    return wrapped


def _callback(watch: _Watch) -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if watch.batches:
                watch.before_update()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            watch.after_update()

    return Callback()
