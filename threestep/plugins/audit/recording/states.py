"""The state of a model about an optimizer step: digests of gradients and weights by parameter, and their values.

A digest is a norm and a hash of the float32 numbers, so that two records compare without their values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from threestep.plugins.audit.recording.schema import SCHEDULES
from threestep.plugins.audit.recording.whole_states import at_next_step, whole_states
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import ADAMW
from training.utils.engine.zero3 import whole_weights
from training.utils.models.weights import adapters_of

if TYPE_CHECKING:
    import numpy as np

    from training.utils.engine.training_engine import TrainingEngine

MOST_WEIGHTS = 20_000_000  # of a model whose values are written: 80 MB for each kind
# Kinds of states (`schema.STATES`) by the engine's name. Of the moments a record without values has nothing.
_BEFORE = {"gradient": "gradients.", "weight": "weights_before.", "exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq."}
_AFTER = {"weight": "weights_after.", "exp_avg": "exp_avg_after."}
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class StateWatch:
    """Reads the state of `engine` about its next step. keeps: values too, of models up to MOST_WEIGHTS.

    values, digests: by KIND.NAME, on the first rank alone; empty where the step was skipped.
    """

    engine: TrainingEngine
    keeps: bool = False
    values: dict[str, np.ndarray] = field(default_factory=dict)
    digests: dict[str, dict[str, Any]] = field(default_factory=dict)
    updates_before: int = 0
    _problem: str = ""

    def start(self) -> None:
        """Watch the next step."""
        count = sum(getattr(weight, "ds_numel", weight.numel()) for weight in self.engine.module.parameters())
        if self.keeps and count > MOST_WEIGHTS:
            log(
                f"warning: --record_values is for models up to {MOST_WEIGHTS:,} weights, but this model has {count:,}; "
                "recording only digests"
            )
            self.keeps = False
        at_next_step(self.engine, self._before, self._after)

    def _before(self) -> None:
        self.updates_before = self.engine.updates
        self._read(_BEFORE)
        if self.keeps:
            for name, weight in self.engine.module.named_parameters():
                if not weight.requires_grad:
                    with whole_weights(self.engine.engine, [weight], self.engine.settings.zero_stage):
                        self._keep(f"weights_before.{name}", weight)

    def _after(self) -> None:
        if self.engine.engine.was_step_applied() is False:
            self.values, self.digests = {}, {}
            return
        self._read(_AFTER)

    def _read(self, kinds: Mapping[str, str]) -> None:
        if self._problem:
            return
        try:
            for kind, prefix in kinds.items():
                if kind in _MOMENTS and not (self.keeps and self._is_adamw):
                    continue
                for name, value in whole_states(self.engine, kind):
                    self._keep(prefix + name, value, with_digest=kind not in _MOMENTS)
        except ThreestepError as problem:
            self._problem = str(problem)
            log(f"warning: the record of this step has no state: {problem}", self.engine.ranks.is_main)

    def _keep(self, name: str, value: torch.Tensor, with_digest: bool = False) -> None:
        if not self.engine.ranks.is_main:
            return
        numbers = value.detach().float().cpu().numpy()
        if with_digest:
            self.digests[name] = digest(numbers)
        if self.keeps:
            self.values[name] = numbers.copy()

    def settings(self) -> dict[str, Any]:
        """The optimizer's settings and the schedule's, by the names of a record."""
        own, engine = self.engine.settings, self.engine.engine
        rate: float | None = own.learning_rate
        adapters = adapters_of(self.engine.module)
        adapter_rate = adapters.learning_rate
        trained = [name for name, weight in self.engine.module.named_parameters() if weight.requires_grad]
        if adapter_rate is not None and all(map(adapters.holds, trained)):
            adapter_rate, rate = None, adapter_rate
        schedule = "constant" if own.lr_scheduler_type.startswith("constant") else own.lr_scheduler_type
        warmup = own.num_warmup_steps or math.ceil(own.warmup_ratio * self.engine.total_steps)
        found = {
            "max_grad_norm": float(engine.gradient_clipping()),
            "updates_before": float(self.updates_before),
            "schedule": schedule if schedule in SCHEDULES else None,  # of a schedule that it knows
            "peak_learning_rate": rate,
            "adapter_learning_rate": adapter_rate,
            "warmup_steps": float(warmup),
            "total_steps": float(self.engine.total_steps),
            **{name: getattr(own, name) for name in ("min_lr_ratio", "stable_ratio")},
            "dtype": own.dtype,
            "master_dtype": "bf16" if own.bf16_optimizer_states else "fp32",
            "dropout": _dropout(self.engine.module),
        }
        if self._is_adamw:
            adamw = {"beta1": own.adam_beta1, "beta2": own.adam_beta2, "adam_epsilon": own.adam_epsilon}
            found |= {**adamw, "weight_decay": own.weight_decay}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def _is_adamw(self) -> bool:
        """False of a plugin's optimizer: a record has no settings and no states of others."""
        return self.engine.settings.optimizer == ADAMW

    def model(self) -> dict[str, Any]:
        """The configuration of the model, and the scale of its adapters."""
        config = getattr(getattr(self.engine.module, "model", None), "config", None)
        if config is None:
            return {}
        scales = set(_adapter_scales(self.engine.module))
        return json.loads(config.to_json_string()) | ({"lora_scale": scales.pop()} if len(scales) == 1 else {})


def digest(numbers: np.ndarray) -> dict[str, Any]:
    """The Euclidean norm, and the SHA-256 of the numbers as little-endian float32."""
    norm = math.sqrt(float((numbers.astype("float64") ** 2).sum()))
    return {"norm": norm, "sha256": hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest()}


def _adapter_scales(module: nn.Module) -> Iterator[float]:
    for part in module.modules():
        scaling = getattr(part, "scaling", None)
        if isinstance(scaling, dict):
            yield from scaling.values()


def _dropout(module: nn.Module) -> float:
    """The largest rate in the model."""
    rates = [part.p for part in module.modules() if isinstance(part, nn.Dropout)]
    config = getattr(getattr(module, "model", None), "config", None)
    return float(max([*rates, getattr(config, "attention_dropout", 0.0) or 0.0]))
