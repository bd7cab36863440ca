"""The settings of other trainers in the words of a record. What has no word there is left out, and so not judged."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from threestep.plugins.audit.recording.template_prompts import template_prompt

_SHAPES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
# Of GRPOConfig.loss_type. `grpo` counts rows without tokens too, and `bnpo` is a micro-batch's mean by its own paper.
_REDUCTIONS = {"grpo": "sequence mean", "dapo": "token mean", "bnpo": "token mean", "dr_grpo": "sequence sum norm"}
_TOKEN_MEAN_SINCE = (0, 16)  # of TRL: before it has loss_type, GRPO's loss is the mean over tokens (pull request 2881)


def settings_of(trainer: Any, kind: str) -> dict[str, Any]:
    """The settings of a trainer. kind: the class of it that is known."""
    own = _OF_KIND[kind](trainer.args)
    tokens = {
        "end_token_id": _token(trainer, "eos_token_id"),
        "begin_token_id": _token(trainer, "bos_token_id"),
        "template_prompt": _template_prompt(trainer),
    }
    return {name: value for name, value in {**_of_optimizer(trainer), **tokens, **own}.items() if value is not None}


def _token(trainer: Any, name: str) -> float | None:
    """The number of a special token, of the tokenizer or of a processor's."""
    processing = getattr(trainer, "processing_class", None)
    number = getattr(getattr(processing, "tokenizer", processing), name, None)
    return None if number is None else float(number)


def _template_prompt(trainer: Any) -> str | None:
    processing = getattr(trainer, "processing_class", None)
    tokenizer: Any = getattr(processing, "tokenizer", processing)
    if not isinstance(getattr(tokenizer, "chat_template", None), str):
        return None
    try:
        return (
            template_prompt(lambda messages: tokenizer.apply_chat_template(messages, tokenize=False), tokenizer) or None
        )
    except Exception:  # noqa: BLE001 (a template may raise whatever it likes: then nothing is known of it)
        return None


def version_of(package: str) -> str:
    """ "" where it is not installed, as for a trainer that stands for one of its."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


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
    }


def _of_labels(args: Any) -> dict[str, Any]:
    is_plain = getattr(args, "loss_type", "nll") == "nll" and not args.label_smoothing_factor
    return {"reduction": "token mean"} if is_plain else {}


def _of_dpo(args: Any) -> dict[str, Any]:
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    known = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
    return {
        "preference_loss": known.get(kinds[0]) if len(kinds) == 1 else None,
        "beta": args.beta,
        "label_smoothing": args.label_smoothing,
        "longest_row": None if args.max_length is None else float(args.max_length),
        "cut": {"keep_start": "end", "keep_end": "begin"}.get(str(getattr(args, "truncation_mode", "keep_start"))),
    }


def _of_kto(args: Any) -> dict[str, Any]:
    return {
        "preference_loss": "kto" if getattr(args, "loss_type", "kto") == "kto" else None,
        "beta": args.beta,
        "desirable_weight": args.desirable_weight,
        "undesirable_weight": args.undesirable_weight,
    }


def _of_reward(args: Any) -> dict[str, Any]:
    return {"center_coef": float(args.center_rewards_coefficient or 0.0), "margin_scale": 0.0}


def _of_policy(args: Any) -> dict[str, Any]:
    high = getattr(args, "epsilon_high", None)
    return {
        "temperature": args.temperature,
        "kl_coef": args.beta,
        "clip_low": args.epsilon if getattr(args, "delta", None) is None else None,
        "clip_high": args.epsilon if high is None else high,
    }


def _of_grpo(args: Any) -> dict[str, Any]:
    scale = {True: "group", "group": "group", "batch": "batch", False: "none", "none": "none"}.get(args.scale_rewards)
    levels = {"token": "token", "sequence": "sequence mean"}
    return {
        **_of_policy(args),
        "reduction": _reduction(args),
        "longest_tokens": float(args.max_completion_length),
        "advantage": "grpo",
        "norm_by": scale,
        "std_ddof": 1.0,
        "std_epsilon": 1e-4,
        "kl_estimator": "k3",
        "kl_in": "loss" if args.beta else "none",
        "kl_weighted": bool(getattr(args, "use_bias_correction_kl", False)),
        "ratio": levels.get(getattr(args, "importance_sampling_level", "token")),
    }


def _reduction(args: Any) -> str | None:
    if hasattr(args, "loss_type"):
        return _REDUCTIONS.get(args.loss_type)
    major, minor, *_ = version_of("trl").split(".")
    return "token mean" if (int(major), int(minor)) >= _TOKEN_MEAN_SINCE else "sequence mean"


def _of_rloo(args: Any) -> dict[str, Any]:
    """The whole response is one action (Ahmadian et al. 2024): its ratio, its KL, its reward."""
    return {
        **_of_policy(args),
        "reduction": "sequence mean",
        "advantage": None if args.reward_clip_range else "rloo",
        "norm_by": "batch" if args.normalize_advantages else "none",
        "std_ddof": 1.0,
        "std_epsilon": 1e-4,
        "kl_estimator": "k1",
        "kl_in": "reward" if args.beta else "none",
        "ratio": "sequence sum",
    }


_OF_KIND = {
    "SFTTrainer": _of_labels,
    "Trainer": _of_labels,
    "DPOTrainer": _of_dpo,
    "KTOTrainer": _of_kto,
    "RewardTrainer": _of_reward,
    "GRPOTrainer": _of_grpo,
    "RLOOTrainer": _of_rloo,
}
OBJECTIVES = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "dpo",
    "RewardTrainer": "reward",
    "GRPOTrainer": "policy",
    "RLOOTrainer": "policy",
    "Trainer": "sft",  # of transformers; the others are TRL's
}
