"""The settings of TRL's trainers in the words of a record. What has no word there is left out, and so not judged."""

from __future__ import annotations

from typing import Any

_SHAPES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
# Of GRPOConfig.loss_type. `grpo` counts rows without tokens too, and `bnpo` is a micro-batch's mean by its own paper.
_REDUCTIONS = {"grpo": "sequence mean", "dapo": "token mean", "bnpo": "token mean", "dr_grpo": "sequence sum norm"}


def settings_of(trainer: Any, objective: str) -> dict[str, Any]:
    """The settings of a trainer for this objective."""
    own = {"sft": _of_sft, "dpo": _of_dpo, "policy": _of_grpo}[objective](trainer.args)
    return {name: value for name, value in {**_of_optimizer(trainer), **own}.items() if value is not None}


def _of_optimizer(trainer: Any) -> dict[str, Any]:
    args, total = trainer.args, float(trainer.state.max_steps)
    return {
        "max_grad_norm": float(args.max_grad_norm or 0.0),
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "adam_epsilon": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "schedule": _SHAPES.get(str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))),
        "peak_learning_rate": args.learning_rate,
        "warmup_steps": float(args.get_warmup_steps(int(total))),
        "total_steps": total,
        "accumulation_steps": float(args.gradient_accumulation_steps),
        "end_token_id": _token(trainer, "eos_token_id"),
        "begin_token_id": _token(trainer, "bos_token_id"),
    }


def _token(trainer: Any, name: str) -> float | None:
    """The number of a special token, of the tokenizer or of a processor's."""
    processing = getattr(trainer, "processing_class", None)
    number = getattr(getattr(processing, "tokenizer", processing), name, None)
    return None if number is None else float(number)


def _of_sft(args: Any) -> dict[str, Any]:
    return {"reduction": "token mean"} if args.loss_type == "nll" and not args.label_smoothing_factor else {}


def _of_dpo(args: Any) -> dict[str, Any]:
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    known = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
    return {
        "preference_loss": known.get(kinds[0]) if len(kinds) == 1 else None,
        "beta": args.beta,
        "label_smoothing": args.label_smoothing,
    }


def _of_grpo(args: Any) -> dict[str, Any]:
    scale = {True: "group", "group": "group", "batch": "batch", False: "none", "none": "none"}.get(args.scale_rewards)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return {
        "reduction": _REDUCTIONS.get(args.loss_type),
        "longest_tokens": float(args.max_completion_length),
        "temperature": args.temperature,
        "advantage": "grpo",
        "norm_by": scale,
        "std_ddof": 1.0,
        "std_epsilon": 1e-4,
        "kl_estimator": "k3",
        "kl_in": "loss" if args.beta else "none",
        "kl_coef": args.beta,
        "clip_low": args.epsilon if args.delta is None else None,
        "clip_high": high,
    }
