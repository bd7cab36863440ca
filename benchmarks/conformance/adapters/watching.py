"""A view of any trainer built on transformers' Trainer, from its callbacks and from hooks on the model: no line of the
trainer is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import TrainerCallback

from benchmarks.conformance.seen import MicroBatch, Seen, flat

# One plain step of SGD moves the weights by the gradient; a bound on the gradient of 0 turns clipping off.
PLAIN = {
    "optim": "sgd",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "seed": 0,
}


class Watch(TrainerCallback):
    """Fills a Seen."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.current: list[MicroBatch] = []
        self.inputs: list[dict[str, Any]] = []
        self.handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        body = model.model
        self.handles = [
            body.register_forward_pre_hook(self._got, with_kwargs=True),
            body.norm.register_forward_hook(self._gave),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if not self.seen.weights:
            self.seen.weights.append(flat(dict(model.named_parameters())))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        named = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in model.named_parameters()
        }
        self.seen.gradients.append(flat(named))
        self.seen.batches.append(self.current)
        self.seen.inputs.append(self.inputs)
        self.current, self.inputs = [], []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.seen.weights.append(flat(dict(model.named_parameters())))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "loss" in logs:
            self.seen.losses.append(float(logs["loss"]))

    def on_train_end(self, *given: Any, **more: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _got(self, module: Any, given: tuple, named: dict) -> None:
        if not torch.is_grad_enabled():
            return
        ids = named.get("input_ids", given[0] if given else None)
        if ids is None:
            return
        mask = named.get("attention_mask")
        mask = mask.clone() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        positions = named.get("position_ids")
        self.current.append(MicroBatch(ids.clone(), mask, None if positions is None else positions.clone()))

    def _gave(self, module: Any, given: tuple, output: torch.Tensor) -> None:
        if not (torch.is_grad_enabled() and output.requires_grad and self.current):
            return
        batch = self.current[-1]

        def keep(gradient: torch.Tensor) -> None:
            batch.trained = gradient.abs().amax(-1) > 0

        output.register_hook(keep)


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Every Trainer that is made inside is watched."""
    from transformers import trainer

    seen = Seen()
    watch = Watch(seen)
    plain = transformers.Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        if not hasattr(inputs, "get"):  # a generation batch, that is a list of rows
            return plain(self, model, inputs, *given, **more)
        labels = inputs.get("labels")
        labels = None if labels is None else labels.clone()
        watch.inputs.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        mask, count = inputs.get("attention_mask"), len(watch.current)
        result = plain(self, model, inputs, *given, **more)
        for batch in watch.current[count:]:
            if labels is not None and labels.shape == batch.ids.shape:
                batch.labels = labels
            if batch.mask is None and mask is not None and mask.shape == batch.ids.shape:
                batch.mask = mask.clone()
        return result

    trainer.DEFAULT_CALLBACKS.append(watch)
    transformers.Trainer.training_step = training_step
    try:
        yield seen
    finally:
        transformers.Trainer.training_step = plain
        trainer.DEFAULT_CALLBACKS.remove(watch)


def released(*packages: str) -> dict[str, str]:
    """Versions of packages, as installed here."""
    from importlib.metadata import version

    return {package: version(package) for package in packages}
