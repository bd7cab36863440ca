"""One model under DeepSpeed: forward, exact backward, step, and reading its full weights; or frozen, its forward alone.

A loss here is a sum divided by a count over the whole optimizer step on all ranks. DeepSpeed averages over ranks
and over accumulation; `TrainingEngine.backward` undoes both, in that one place. Knows no task and no loss.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.machine import is_out_of_memory, out_of_memory_sentence
from training.utils.contracts.token_rows import PAD_SEGMENT, TokenRows
from training.utils.engine.checkpoint_files import plain_checkpoint_engine
from training.utils.engine.config.config import engine_config
from training.utils.engine.config.schedules import OWN_SCHEDULES, ScheduleShape, share_of_peak
from training.utils.engine.optimizers import FiniteSteps, make_optimizer
from training.utils.engine.ranks.collectives import wait_for_main
from training.utils.engine.zero3 import full_tensors, limits_of, release_gathered, whole_weights
from training.utils.flags.flags import settings_of
from training.utils.models.weights import buffers_kept, count_elements

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import Ranks

_SHOWN_ROWS = 16
_ZERO3_CLASSES = ("pre_bwd_fn", "post_bwd_fn")


@dataclass(frozen=True)
class StepReport:
    """learning_rate: of the step just taken.
    grad_norm: before clipping, over all ranks; infinite where the step was skipped; NaN if DeepSpeed has none.
    skipped: a rank's loss or gradient was not finite (float16 finds its loss scale that way); nothing was updated.
    """

    learning_rate: float
    grad_norm: float
    skipped: bool

    def figures(self, group: str) -> dict[str, float]:
        """Return metrics named GROUP/...; without the norm where DeepSpeed has none."""
        figures = {f"{group}/learning_rate": self.learning_rate, f"{group}/skipped": float(self.skipped)}
        if not math.isnan(self.grad_norm):
            figures[f"{group}/grad_norm"] = self.grad_norm
        return figures


class TrainingEngine:
    """A module that DeepSpeed trains, in train mode at first. total_steps: the length of the learning-rate schedule."""

    def __init__(self, module: nn.Module, settings: EngineSettings, ranks: Ranks, total_steps: int) -> None:
        import deepspeed

        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trainable:
            raise ThreestepError(
                "nothing to train: every weight of the model is frozen; unfreeze some, or train adapters"
            )
        on_gpu, limits = ranks.device.type == "cuda", limits_of(module, settings, ranks)
        config = engine_config(settings, ranks.world_size, count_elements(trainable), on_gpu, limits=limits)
        optimizer = make_optimizer(module, settings)
        names = {parameter: name for name, parameter in module.named_parameters()}
        # Names of the weights in each group of the optimizer, in its order.
        self.parameter_groups = [[names[weight] for weight in group["params"]] for group in optimizer.param_groups]
        self.settings = settings
        self.ranks = ranks
        self.total_steps = total_steps
        self._rows: object = None  # of the last forward, for errors
        # On the device from the start: numbers would be copied to it, and waited for, in each backward.
        self._rank_scale = torch.full((), float(ranks.world_size), device=ranks.device)
        self._bad_scale = torch.full((), math.nan, device=ranks.device)
        scheduler = _scheduler(optimizer, settings, total_steps)
        options = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        # DeepSpeed prints its memory use while it builds some optimizers (deepspeed 0.19, bf16_optimizer.py).
        with contextlib.redirect_stdout(io.StringIO()), buffers_kept(module):
            self.engine, _, _, self.scheduler = deepspeed.initialize(
                model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
            )
        self.engine.checkpoint_engine = plain_checkpoint_engine()
        self.engine._copy_recovery_script = lambda folder: None  # programs of DeepSpeed's for its pickles
        if isinstance(self.engine.optimizer, FiniteSteps):
            self.engine.clip_fp32_gradients = partial(_clip_noting_norm, self.engine)
        ranks.leaving.callback(release, self.engine)
        self._check_taken(config)
        _undo_trial_step(self.engine.optimizer, options)
        _train_in_place(self.engine.optimizer)
        self.train()  # a model that transformers loaded is in eval mode, which turns recomputation off

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._rows = next(iter(args), None)
        with self._memory_explained("a forward"):
            outputs = self.engine(*args, **kwargs)
        if not torch.is_grad_enabled():
            release_gathered(self.engine)  # no backward follows
        return outputs

    def train(self, mode: bool = True) -> None:
        self.engine.train(mode)

    def eval(self) -> None:
        self.engine.eval()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` to the step's. `loss` is this micro-batch's part of the step's loss: its sum
        over tokens (or sequences) divided by the count over all ranks and micro-batches.

        DeepSpeed divides the sum over ranks by their number, which the scale undoes, and by the accumulation count,
        which scale_wrt_gas=False turns off (deepspeed 0.19: engine.backward).

        An infinite loss may have a finite gradient. Here its gradient is NaN, which the reduction carries to all ranks,
        so that every rank skips the step.
        """
        scale = torch.where(loss.detach().isfinite(), self._rank_scale, self._bad_scale)
        with self._memory_explained("a backward"):
            self.engine.backward(loss * scale, scale_wrt_gas=False)

    def step(self) -> StepReport:
        """Reduce, clip and apply the gradients since the last step; drop them if they are not finite."""
        learning_rate = float(self.engine.optimizer.param_groups[0]["lr"])
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
        """Optimizer steps that changed the weights, including those before a checkpoint that was resumed."""
        return self.engine.global_steps - self.engine.skipped_steps

    def _memory_explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return memory_explained(doing, self.ranks.rank, lambda: rows_in_words(self._rows))

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole weight) for every weight of `model`, the module or a part of it, with adapters merged and
        the plain model's names. A collective under ZeRO-3. A tensor is valid until the next one is yielded."""
        release_gathered(self.engine)
        yield from full_tensors(model, self.settings.zero_stage)

    def full_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of all weights of `model` on the CPU on rank 0, an empty dict elsewhere. A collective."""
        wait_for_main()  # rank 0 may still be writing another model
        state = {}
        for name, tensor in self.full_tensors(model):
            if self.ranks.is_main:
                state[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return state

    def _check_taken(self, requested: dict[str, Any]) -> None:
        """Compare DeepSpeed's settings with the requested ones: it silently ignores those that it does not know."""
        engine = self.engine
        taken = {
            "ZeRO stage": (engine.zero_optimization_stage(), requested["zero_optimization"]["stage"]),
            "gradient clipping": (engine.gradient_clipping(), requested["gradient_clipping"]),
            "bf16": (engine.bfloat16_enabled(), requested.get("bf16", {}).get("enabled", False)),
            "bf16 optimizer states": (
                engine.bf16_optimizer_states(),
                requested.get("bf16", {}).get("bf16_optimizer_states", False),
            ),
            "fp16": (engine.fp16_enabled(), requested.get("fp16", {}).get("enabled", False)),
            "managed accumulation": (engine.managed_gradient_accumulation(), False),
        }
        for what, (ran, wanted) in taken.items():
            if ran != wanted:
                raise ThreestepError(
                    f"DeepSpeed runs with {what} = {ran} instead of {wanted}; use the version in constraints.txt"
                )


def _clip_noting_norm(engine: Any) -> None:
    """DeepSpeed's clipping in float32 at stage 0, which drops the norm (deepspeed 0.19, engine.py:
    clip_fp32_gradients)."""
    from deepspeed.runtime.utils import clip_grad_norm_

    engine.optimizer.clipped_from = clip_grad_norm_(
        parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
    )


def _undo_trial_step(wrapper: Any, options: list[dict[str, Any]]) -> None:
    """Undo the step with zero gradients that DeepSpeed's half-precision stage 0 takes at the start. options: of the
    optimizer's groups before, where some optimizers count their steps.

    It allocates the optimizer's state (deepspeed 0.19, FP16_UnfusedOptimizer.initialize_optimizer_states), but leaves
    Adam's bias correction one step ahead and the float32 weights decayed once: updates 13 % too small over the first
    four steps.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(wrapper, FP16_UnfusedOptimizer):
        return
    wrapper.optimizer.state.clear()
    for group, before in zip(wrapper.optimizer.param_groups, options, strict=True):
        group.update(before)
    for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def _train_in_place(wrapper: Any) -> None:
    """Have the optimizer of ZeRO 1 and 2 update this rank's share of float32 weights where the model has it, instead of
    a copy: 4 bytes a weight less.

    DeepSpeed clones it as a master copy for any precision, and copies it back after each step, which then copies the
    share to itself (deepspeed 0.19, stage_1_and_2.py: __init__, step). Checkpoints are read into both by copies.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(wrapper, DeepSpeedZeroOptimizer) or wrapper.cpu_offload or wrapper.dtype != torch.float32:
        return
    for number, master in enumerate(wrapper.single_partition_of_fp32_groups):
        place = torch.distributed.get_rank(wrapper.real_dp_process_group[number])
        master.data = wrapper.parallel_partitioned_bit16_groups[number][place].data
    wrapper._link_all_hp_params()  # views of the copies


def _scheduler(optimizer: torch.optim.Optimizer, settings: EngineSettings, total_steps: int) -> Any:
    warmup = settings.num_warmup_steps or math.ceil(settings.warmup_ratio * total_steps)
    if (schedule := OWN_SCHEDULES.get(settings.lr_scheduler_type)) is not None:
        shape = settings_of(ScheduleShape, settings, warmup_steps=warmup, total_steps=total_steps)
        return LambdaLR(optimizer, partial(share_of_peak, shape=shape, after_warmup=schedule.after_warmup))
    from transformers import get_scheduler

    # Its polynomial divides by the steps after warm-up, of which there may be none.
    steps = max(total_steps, warmup + 1) if settings.lr_scheduler_type == "polynomial" else total_steps
    try:
        return get_scheduler(settings.lr_scheduler_type, optimizer, warmup, steps)
    except ValueError as problem:
        raise ThreestepError(f"--lr_scheduler_type: {problem}") from problem


def release(engine: Any) -> None:
    """Release an engine and the weights that it trains; neither can be used afterwards.

    DeepSpeed ties weights, hooks and its wrappers together in circles that pass through autograd's C++ objects, which
    Python's collector does not see: without this a ZeRO run leaves its model, its process groups, their threads and
    sockets to the process (deepspeed 0.19: runtime/utils.py, zero/parameter_offload.py).
    """
    module, weights = engine.module, list(engine.module.parameters())
    wrapper = engine.optimizer
    engine.destroy()
    engine.optimizer = None
    for weight in weights:
        weight.grad = None
        weight.__dict__.clear()
    for part in module.modules():
        for name in _ZERO3_CLASSES:
            part.__dict__.pop(name, None)
        for hooks in (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    offload = getattr(wrapper, "parameter_offload", None)
    if offload is not None:
        offload.__dict__.clear()
        wrapper.__dict__.clear()
    gc.collect()


class FrozenModel:
    """Calls a module without gradients. With ZeRO-3 settings its weights stay sharded between calls."""

    def __init__(self, module: nn.Module, settings: EngineSettings, ranks: Ranks) -> None:
        module.requires_grad_(False)
        module.eval()
        self._module = self._inside = module
        self._rank, self._stage = ranks.rank, settings.zero_stage
        if settings.zero_stage == 3:
            import deepspeed

            limits = limits_of(module, settings, ranks)
            config = engine_config(settings, ranks.world_size, 1, ranks.device.type == "cuda", limits=limits)
            config["zero_optimization"].pop("offload_optimizer", None)
            with buffers_kept(module):
                self._module, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
            self._module.eval()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model inside."""
        return self._inside.model  # type: ignore[return-value]

    @contextlib.contextmanager
    def whole(self, weights: list[nn.Parameter]) -> Iterator[None]:
        """Inside, `weights` of the model are whole, to be read. A collective under ZeRO-3; no forward of this model may
        run inside."""
        with whole_weights(self._module, weights, self._stage):
            yield

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with memory_explained("a forward", self._rank, lambda: rows_in_words(*args[:1])):
            return self._module(*args, **kwargs)


@contextlib.contextmanager
def memory_explained(doing: str, rank: int, shape: Callable[[], str]) -> Iterator[None]:
    """Inside, an allocator's out-of-memory error becomes a ThreestepError, as does what --deterministic refuses.

    shape: describes the input
    """
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if "deterministic implementation" in str(problem):  # torch's words, with --deterministic on CUDA
            raise ThreestepError(
                f"--deterministic: {doing} of {shape()} needs an operation that has no deterministic version on CUDA "
                f"({first_line(problem)}); remove the flag"
            ) from problem
        if not is_out_of_memory(problem):
            raise
        raise ThreestepError(out_of_memory_sentence(problem, f" on rank {rank} in {doing} of {shape()}")) from problem


def rows_in_words(rows: object) -> str:
    """Describe a TokenRows: its rows, their width, and the tokens of each that are not padding."""
    if not isinstance(rows, TokenRows):
        return "a micro-batch"
    count, width = rows.input_ids_NT.shape
    lengths = (rows.segment_ids_NT != PAD_SEGMENT).sum(dim=1).tolist()
    shown = ", ".join(str(length) for length in lengths[:_SHOWN_ROWS]) + (", ..." if count > _SHOWN_ROWS else "")
    return (
        f"{count} row{'s' if count != 1 else ''} of {width} tokens ({rows.end_B.numel()} sequences; tokens per row "
        f"without padding: {shown})"
    )
