"""One model under DeepSpeed: forward, exact backward, step, and its full weights read back out.

A loss here is a sum divided by a count over the whole optimizer step on all ranks. DeepSpeed averages over ranks
and over accumulation; `TrainingEngine.backward` undoes both, in that one place. Knows no task and no loss.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.utils.engine.checked_adamw import CheckedAdamW
from training.utils.engine.collectives import wait_for_main
from training.utils.engine.config import deepspeed_config
from training.utils.engine.out_of_memory import memory_explained, rows_in_words
from training.utils.engine.settings import EngineSettings
from training.utils.engine.startup import Ranks
from training.utils.layout.rows import TokenRows
from training.utils.run.errors import ThreestepError

_GATHER_ELEMENTS = 50_000_000  # ZeRO-3 weights gathered at a time when all are read: 200 MB in float32


@dataclass(frozen=True)
class StepReport:
    """learning_rate: of the step just taken. grad_norm: before clipping, over all ranks, NaN where DeepSpeed keeps
    none, infinite where the step was skipped. skipped: a loss or gradient of some rank was not finite (in float16 that
    is also how the loss scale is found), and nothing was updated."""

    learning_rate: float
    grad_norm: float
    skipped: bool

    def figures(self, group: str) -> dict[str, float]:
        """As metrics named `group`/...; a norm that DeepSpeed does not keep (float32 at stage 0) is left out."""
        figures = {f"{group}/learning_rate": self.learning_rate, f"{group}/skipped": float(self.skipped)}
        if not math.isnan(self.grad_norm):
            figures[f"{group}/grad_norm"] = self.grad_norm
        return figures


class TrainingEngine:
    """A module that DeepSpeed trains. `settings` say how; `total_steps` is what the LR schedule spans."""

    def __init__(self, module: nn.Module, settings: EngineSettings, ranks: Ranks, total_steps: int) -> None:
        import deepspeed

        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trainable:
            raise ThreestepError("nothing to train: every weight of the model is frozen")
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainable)
        config = deepspeed_config(settings, ranks.world_size, elements, ranks.device.type == "cuda")
        optimizer = _optimizer(module, settings, ranks.device)
        names = {parameter: name for name, parameter in module.named_parameters()}
        # The names of the weights in each group of the optimizer, in its order.
        self.parameter_groups = [[names[weight] for weight in group["params"]] for group in optimizer.param_groups]
        self.settings = settings
        self.ranks = ranks
        self._rows: TokenRows | None = None  # of the last forward, for errors
        # DeepSpeed prints its memory use while it builds some optimizers (deepspeed 0.19, bf16_optimizer.py).
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, _, _, self.scheduler = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                lr_scheduler=_scheduler(optimizer, settings, total_steps),
                config=config,
                dist_init_required=False,
            )
        self._check_taken(config)
        _undo_trial_step(self.engine.optimizer)

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._rows = args[0] if args and isinstance(args[0], TokenRows) else None
        with self._memory_explained("a forward"):
            return self.engine(*args, **kwargs)

    def train(self) -> None:
        self.engine.train()

    def eval(self) -> None:
        self.engine.eval()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` to the step's. `loss` is this micro-batch's part of the step's loss: its sum
        over tokens (or sequences) divided by the count over all ranks and micro-batches.

        DeepSpeed divides the sum over ranks by their number, which is undone by multiplying here, and divides by
        the accumulation count unless told not to (deepspeed 0.19: engine.backward, scale_wrt_gas).

        A loss that is infinite may have a finite gradient. Here it gets one of NaN, which the reduction carries to all
        ranks: every one of them skips the step.
        """
        scale = torch.where(loss.detach().isfinite(), float(self.ranks.world_size), math.nan)
        with self._memory_explained("a backward"):
            self.engine.backward(loss * scale, scale_wrt_gas=False)

    def step(self) -> StepReport:
        """Reduce, clip and apply the gradients added up since the last step, or drop them where they are not finite."""
        learning_rate = self.optimizer_learning_rate()
        with self._memory_explained("an optimizer step after a backward"):
            self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return StepReport(
            learning_rate=learning_rate,
            grad_norm=float("nan") if norm is None else float(norm),
            skipped=not self.engine.was_step_applied(),
        )

    @property
    def updates(self) -> int:
        """Optimizer steps that changed the weights, those of the run that a checkpoint goes on from included."""
        return self.engine.global_steps - self.engine.skipped_steps

    def _memory_explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return memory_explained(doing, self.ranks.rank, lambda: rows_in_words(self._rows))

    def optimizer_learning_rate(self) -> float:
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole weight) for every weight of `model`, the module or a part of it, LoRA merged, under the
        plain model's names. A collective under ZeRO-3; a yielded tensor is valid until the next is asked for."""
        yield from full_tensors(model, self.settings.zero_stage)

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of all weights of `model` on the CPU, on rank 0; an empty dict elsewhere. A collective."""
        wait_for_main()  # the first rank may still be writing another model
        state = {}
        for name, tensor in self.full_tensors(model):
            if self.ranks.is_main:
                state[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return state

    def _check_taken(self, asked: dict[str, Any]) -> None:
        """DeepSpeed drops what it does not understand in silence: compare what it runs with what was asked."""
        engine = self.engine
        taken = {
            "ZeRO stage": (engine.zero_optimization_stage(), asked["zero_optimization"]["stage"]),
            "gradient clipping": (engine.gradient_clipping(), asked["gradient_clipping"]),
            "bf16": (engine.bfloat16_enabled(), asked.get("bf16", {}).get("enabled", False)),
            "fp16": (engine.fp16_enabled(), asked.get("fp16", {}).get("enabled", False)),
            "managed accumulation": (engine.managed_gradient_accumulation(), False),
        }
        for what, (ran, wanted) in taken.items():
            if ran != wanted:
                raise ThreestepError(
                    f"DeepSpeed runs with {what} = {ran} where {wanted} was asked for; this version differs"
                )


def full_tensors(model: nn.Module, zero_stage: int, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """See TrainingEngine.full_tensors. merged: False gives the weights below the LoRA adapters."""
    from training.utils.models.lora import is_adapter_tensor, layer_parameters, lora_delta, merged_name

    names = [name for name, _ in model.named_parameters() if not is_adapter_tensor(name)]
    for bucket in _buckets(model, names):
        parameters = [part for name in bucket for part in layer_parameters(model, name)]
        with _gathered(parameters, zero_stage), torch.no_grad():
            for name in bucket:
                tensor = model.get_parameter(name).detach()
                delta = lora_delta(model, name) if merged else None
                yield merged_name(name), tensor if delta is None else tensor + delta.to(tensor.dtype)
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in parameter_names and not is_adapter_tensor(name):
            yield merged_name(name), tensor


def _buckets(model: nn.Module, names: list[str]) -> Iterator[list[str]]:
    bucket: list[str] = []
    elements = 0
    for name in names:
        parameter = model.get_parameter(name)
        bucket.append(name)
        elements += getattr(parameter, "ds_numel", parameter.numel())
        if elements >= _GATHER_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


@contextlib.contextmanager
def _gathered(parameters: list[nn.Parameter], zero_stage: int) -> Iterator[None]:
    if zero_stage != 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield


def _optimizer(module: nn.Module, settings: EngineSettings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW without decay on vectors (biases, norms), as GPT-3 and its successors train."""
    from training.utils.models.lora import is_adapter_tensor

    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    adapters: list[nn.Parameter] = []  # where they have a rate of their own
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if settings.lora_learning_rate is not None and is_adapter_tensor(name):
            adapters.append(parameter)
        else:
            dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            (decayed if dimensions >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
        {"params": adapters, "weight_decay": settings.weight_decay, "lr": settings.lora_learning_rate},
    ]
    # torch's fused AdamW is vectorised on the CPU and one kernel on the GPU, and nothing has to be compiled.
    plain_adamw = settings.zero_stage == 0 and settings.dtype == "fp32"
    return (CheckedAdamW if plain_adamw else torch.optim.AdamW)(
        [group for group in groups if group["params"]], lr=settings.learning_rate, betas=settings.adam_betas, fused=True
    )


def _undo_trial_step(wrapper: Any) -> None:
    """Take back the step with zero gradients that DeepSpeed's half-precision stage 0 makes at its start.

    It is there to allocate the optimizer's state (deepspeed 0.19, FP16_UnfusedOptimizer.initialize_optimizer_states),
    and it leaves Adam's bias correction one step ahead and the float32 weights decayed once: updates 13 % too small
    over the first four steps.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(wrapper, FP16_UnfusedOptimizer):
        return
    wrapper.optimizer.state.clear()
    for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def _scheduler(optimizer: torch.optim.Optimizer, settings: EngineSettings, total_steps: int) -> Any:
    from transformers import get_scheduler

    try:
        return get_scheduler(settings.lr_scheduler_type, optimizer, settings.num_warmup_steps, total_steps)
    except ValueError as problem:
        raise ThreestepError(f"--lr_scheduler_type: {problem}") from problem
