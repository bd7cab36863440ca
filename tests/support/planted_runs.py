"""A step's program with one difference planted, for runs that are bisected.

    THREESTEP_PLANT=NAME python -m tests.support.planted_runs MODULE FLAGS

Those of `PLANTS` act in one step, `AT`, on the rank `RANK` where there are two; the others from the start on.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

VARIABLE = "THREESTEP_PLANT"
AT = 3
RANK = 1
_now = 0


def is_now() -> bool:
    return _now == AT


def main() -> None:
    """Plant, and run the module."""
    name = os.environ.get(VARIABLE, "")
    _follow_steps()
    if name:
        PLANTS[name]()
    module, *flags = sys.argv[1:]
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _follow_steps() -> None:
    """Know the step that runs."""
    from training.step1_sft.trainer import SftTrainer
    from training.step2_dpo.trainer import DpoTrainer
    from training.step2_reward.trainer import RewardTrainer
    from training.step3_ppo.trainer import PpoTrainer

    def before(kind: type, method: str, number: Callable[..., int]) -> None:
        original = getattr(kind, method)

        def noting(self: Any, *given: Any, **named: Any) -> Any:
            global _now
            _now = number(*given)
            for act in _BEFORE_STEP:
                act(self)
            return original(self, *given, **named)

        setattr(kind, method, noting)

    for kind in (SftTrainer, DpoTrainer, RewardTrainer):
        before(kind, "_optimizer_step", lambda step: step.number)
    before(PpoTrainer, "next_prompts", lambda iteration, batch: iteration)


_BEFORE_STEP: list[Callable[[Any], None]] = []


def _around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that calls `change(original, *given, **named)` in the step, the original elsewhere."""
    original = getattr(owner, name)

    def changed(*given: Any, **named: Any) -> Any:
        return change(original, *given, **named) if is_now() else original(*given, **named)

    setattr(owner, name, changed)


# --- data


def row() -> None:
    from training.utils.layout.order import ShuffledStream

    original = ShuffledStream.take

    def take(self: Any, start: int, count: int) -> list[int]:
        taken = original(self, start, count)
        return [(taken[0] + 1) % self.rows, *taken[1:]] if start == (AT - 1) * count else taken

    ShuffledStream.take = take  # type: ignore[method-assign]


def _change_rows(change: Callable[[Any], Any]) -> None:
    """Change the rows of the first micro-batch."""
    from training.step1_sft.trainer import SftTrainer

    def changed(original: Any, self: Any, sentences: Any, plan: Any) -> Any:
        first, *others = original(self, sentences, plan)
        is_mine = self.run.ranks.world_size == 1 or self.run.ranks.rank == RANK
        return [replace(first, rows=change(first.rows)), *others] if is_mine else [first, *others]

    _around(SftTrainer, "_micro_batches", changed)


def token() -> None:
    def change(rows: Any) -> Any:
        ids = rows.input_ids_NT.clone()
        ids[0, 1] = (ids[0, 1] + 1) % 300
        return replace(rows, input_ids_NT=ids)

    _change_rows(change)


def mask() -> None:
    _change_rows(lambda rows: rows.with_targets(rows.target_ids_M[1:], rows.predictor_M[1:], rows.sequence_M[1:]))


def target() -> None:
    def change(rows: Any) -> Any:
        return replace(rows, target_ids_M=torch.cat([rows.target_ids_M[:1] + 1, rows.target_ids_M[1:]]))

    _change_rows(change)


# --- state


def _weight(model: Any, name: str) -> torch.Tensor:
    return dict(model.named_parameters())[name].data


def _before_step(act: Callable[[Any], None]) -> None:
    _BEFORE_STEP.append(lambda trainer: act(trainer) if is_now() else None)


def _engine(trainer: Any) -> Any:
    return trainer.run.engine if hasattr(trainer, "run") else trainer.roles.actor


def weight() -> None:
    _before_step(
        lambda trainer: _weight(_engine(trainer).module, "model.model.layers.0.mlp.up_proj.weight")[0, 0].add_(1e-3)
    )


def weight_by_a_bit() -> None:
    def act(trainer: Any) -> None:
        values = _weight(_engine(trainer).module, "model.model.layers.1.input_layernorm.weight")
        values[3] = torch.nextafter(values[3], torch.tensor(9.0))

    _before_step(act)


def random_state() -> None:
    _before_step(lambda trainer: torch.rand(1) and None)


def first_moment() -> None:
    def act(trainer: Any) -> None:
        weights = dict(_engine(trainer).module.named_parameters())
        chosen = weights["model.model.layers.1.self_attn.o_proj.weight"]
        _engine(trainer).engine.optimizer.state[chosen]["exp_avg"].mul_(0.5)

    _before_step(act)


def second_moment() -> None:
    def act(trainer: Any) -> None:
        weights = dict(_engine(trainer).module.named_parameters())
        chosen = weights["model.model.layers.0.self_attn.k_proj.weight"]
        _engine(trainer).engine.optimizer.state[chosen]["exp_avg_sq"].mul_(4.0)

    _before_step(act)


# --- forward, backward, optimizer


def _hooked(name: str, change: Callable[[Any], Any]) -> None:
    """Change what a module returns in the step."""
    seen: list[Any] = []

    def act(trainer: Any) -> None:
        if seen:
            return
        module = dict(_engine(trainer).module.named_modules())[name]

        def hook(_module: Any, _given: Any, output: Any) -> Any:
            if not is_now():
                return None
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        seen.append(module.register_forward_hook(hook))

    _BEFORE_STEP.append(act)


def mlp_output() -> None:
    _hooked("model.model.layers.1.mlp.down_proj", lambda output: output * (1 + 1e-6))


def query() -> None:
    _hooked("model.model.layers.0.self_attn.q_proj", lambda output: output * 1.001)


def norm_output() -> None:
    _hooked("model.model.layers.1.post_attention_layernorm", lambda output: output + 1e-5)


def attention_output() -> None:
    _hooked(
        "model.model.layers.0.self_attn.o_proj", lambda output: output.roll(1, 0) if len(output) > 1 else output * 1.01
    )


def large_output() -> None:
    _hooked("model.model.layers.0.mlp.down_proj", lambda output: output * 3.0)


class _Scaled(torch.autograd.Function):
    """The same number, with its gradient scaled."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 1.01


def output_gradient() -> None:
    _hooked("model.model.layers.0.mlp.gate_proj", _Scaled.apply)


def _gradient_hook(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    seen: list[Any] = []

    def act(trainer: Any) -> None:
        if not seen:
            weight = dict(_engine(trainer).module.named_parameters())[name]
            seen.append(weight.register_hook(lambda gradient: change(gradient) if is_now() else gradient))

    _BEFORE_STEP.append(act)


def weight_gradient() -> None:
    _gradient_hook("model.model.layers.0.self_attn.v_proj.weight", lambda gradient: gradient * 0.0)


def embedding_gradient() -> None:
    _gradient_hook("model.model.embed_tokens.weight", lambda gradient: gradient * 1.5)


def dropped_gradient() -> None:
    from training.utils.engine.training_engine import TrainingEngine

    def change(original: Any, self: Any, loss: torch.Tensor) -> Any:
        return original(self, loss * 0.0 if self.ranks.rank == RANK else loss)

    _around(TrainingEngine, "backward", change)


def logprobs() -> None:
    from training.utils.models.target_head import TargetHead

    def change(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = original(self, *given, **named)
        return found._replace(logprobs_M=found.logprobs_M + 1e-5)

    _around(TargetHead, "forward", change)


def loss() -> None:
    import training.step1_sft.trainer as trainer

    _around(trainer, "sft_loss", lambda original, *given: original(*given) * 1.0001)


def learning_rate() -> None:
    def act(trainer: Any) -> None:
        for group in _engine(trainer).engine.optimizer.param_groups:
            group["lr"] *= 2.0

    _before_step(act)


def _in_groups(name: str, value: Any) -> Callable[[], None]:
    def plant() -> None:
        def act(trainer: Any) -> None:
            for group in _engine(trainer).engine.optimizer.param_groups:
                group[name] = value

        _before_step(act)

    return plant


def clipping() -> None:
    from training.utils.engine import training_engine

    def change(original: Any, engine: Any) -> None:
        original(engine)
        for weight in engine.module.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)

    _around(training_engine, "_clip_noting_norm", change)


# --- a library's other version


def other_norm() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        wide = states.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon * 1.5)
        return self.weight * (wide * scale).to(states.dtype)

    LlamaRMSNorm.forward = forward  # type: ignore[method-assign]


def other_activation() -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(states)
        return self.down_proj(gate * torch.sigmoid(1.0001 * gate) * self.up_proj(states))

    LlamaMLP.forward = forward  # type: ignore[method-assign]


def other_adamw() -> None:
    original = torch.optim.AdamW.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **{**named, "eps": 1e-4})

    torch.optim.AdamW.__init__ = init  # type: ignore[method-assign]


# --- pairs


def reference() -> None:
    import training.step2_dpo.trainer as trainer

    def change(original: Any, *given: Any) -> Any:
        first, *others = original(*given)
        return [torch.cat([first[:1] + 1e-4, first[1:]]), *others]

    _around(trainer, "read_reference", change)


def pair_weight() -> None:
    import training.step2_reward.trainer as trainer

    _around(
        trainer, "ranking_loss", lambda original, better, worse, margin, weight, **named: original(
            better, worse, margin, weight * 1.001, **named
        )
    )  # fmt: skip


def score() -> None:
    _hooked("model.model.norm", lambda output: output * 1.0001)


# --- rollouts


def sample() -> None:
    import training.step3_ppo.trainer as trainer

    def change(original: Any, *given: Any, **named: Any) -> Any:
        rollout = original(*given, **named)
        ids = rollout.response_ids_BR.clone()
        ids[1, 0] = (ids[1, 0] + 1) % 300
        return replace(rollout, response_ids_BR=ids)

    _around(trainer, "draw_responses", change)


def sampling_logprobs() -> None:
    import training.step3_ppo.trainer as trainer

    def change(original: Any, *given: Any, **named: Any) -> Any:
        rollout = original(*given, **named)
        return replace(rollout, sampled_logprobs_BR=rollout.sampled_logprobs_BR * 1.001)

    _around(trainer, "draw_responses", change)


def rollout_advantage() -> None:
    from training.step3_ppo.trainer import PpoTrainer

    def change(original: Any, self: Any, samples: Any) -> Any:
        found = original(self, samples)
        advantages = found.advantages_BR.clone()
        advantages[2] += 0.25 * (advantages[2] != 0)
        return replace(found, advantages_BR=advantages)

    _around(PpoTrainer, "experience_of", change)


def rollout_score() -> None:
    from training.step3_ppo.contracts.records import Samples

    original = Samples.scored.func  # type: ignore[attr-defined]

    def scored(self: Any) -> Any:
        found = original(self)
        if not is_now():
            return found
        outcomes = found.outcomes_B.clone()
        outcomes[0] += 0.5
        return replace(found, outcomes_B=outcomes)

    Samples.scored.func = scored  # type: ignore[attr-defined]


def old_logprobs() -> None:
    from training.step3_ppo.trainer import PpoTrainer

    def change(original: Any, self: Any, samples: Any) -> Any:
        found = original(self, samples)
        return replace(found, old_logprobs_BR=found.old_logprobs_BR - 0.01)

    _around(PpoTrainer, "experience_of", change)


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        row, token, mask, target, weight, weight_by_a_bit, random_state, first_moment, second_moment, mlp_output, query,
        norm_output, attention_output, large_output, output_gradient, weight_gradient, embedding_gradient,
        dropped_gradient, logprobs, loss, learning_rate, clipping, other_norm, other_activation, other_adamw, reference,
        pair_weight, score, sample, sampling_logprobs, rollout_advantage, rollout_score, old_logprobs,
    )
} | {"weight_decay": _in_groups("weight_decay", 0.5), "beta2": _in_groups("betas", (0.9, 0.5))}  # fmt: skip


if __name__ == "__main__":
    main()
