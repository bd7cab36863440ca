"""Suggestions for unknown flags."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# What people type, by habit or from other programs, and the flags that have it here, the likeliest first.
_MEANT = {
    "accumulation": ("gradient_accumulation_steps",),
    "algorithm": ("advantage",),
    "alpha": ("lora_alpha",),
    "base_model": ("model_name_or_path", "actor_model_name_or_path"),
    "batch_size": ("per_device_train_batch_size", "per_device_generation_batch_size"),
    "betas": ("adam_beta1", "adam_beta2"),
    "bs": ("per_device_train_batch_size", "per_device_generation_batch_size"),
    "checkpoint": ("resume",),
    "checkpointing_steps": ("save_every",),
    "clip": ("max_grad_norm", "clip_range"),
    "clip_grad": ("max_grad_norm",),
    "context_length": ("max_seq_len", "max_prompt_seq_len"),
    "critic": ("critic_model_name_or_path",),
    "cutoff_len": ("max_seq_len", "max_prompt_seq_len"),
    "data": ("data_path",),
    "dataset": ("data_path",),
    "dataset_path": ("data_path",),
    "epochs": ("num_train_epochs",),
    "estimator": ("advantage",),
    "eval_batch_size": ("per_device_eval_batch_size",),
    "eval_freq": ("eval_interval",),
    "grad_accum": ("gradient_accumulation_steps",),
    "grad_accumulation": ("gradient_accumulation_steps",),
    "grad_clip": ("max_grad_norm",),
    "iterations": ("max_train_steps",),
    "kl_beta": ("kl_coef",),
    "logger": ("report_to",),
    "lora_rank": ("lora_dim", "actor_lora_dim"),
    "lr": ("learning_rate", "actor_learning_rate"),
    "lr_scheduler": ("lr_scheduler_type",),
    "max_grad": ("max_grad_norm",),
    "max_len": ("max_seq_len", "max_prompt_seq_len"),
    "max_new_tokens": ("max_new_tokens", "max_answer_seq_len"),
    "max_tokens": ("max_seq_len", "max_answer_seq_len"),
    "micro_batch_size": ("per_device_train_batch_size", "per_device_training_batch_size"),
    "mini_batch_size": ("per_device_train_batch_size", "per_device_training_batch_size"),
    "mixed_precision": ("dtype",),
    "model": ("model_name_or_path", "actor_model_name_or_path"),
    "model_path": ("model_name_or_path", "actor_model_name_or_path"),
    "n": ("num_samples_per_prompt",),
    "name": ("run_name",),
    "num_epochs": ("num_train_epochs",),
    "num_steps": ("max_train_steps",),
    "out": ("output_dir",),
    "output": ("output_dir",),
    "precision": ("dtype",),
    "pretrain": ("model_name_or_path", "actor_model_name_or_path"),
    "pretrained": ("model_name_or_path", "actor_model_name_or_path"),
    "project": ("report_to",),
    "random_seed": ("seed",),
    "ref_model": ("actor_model_name_or_path",),
    "reward_model": ("critic_model_name_or_path",),
    "rollout_batch_size": ("per_device_generation_batch_size",),
    "save_freq": ("save_every",),
    "save_interval": ("save_every",),
    "save_path": ("output_dir",),
    "scheduler": ("lr_scheduler_type",),
    "seq_len": ("max_seq_len", "max_prompt_seq_len"),
    "sequence_length": ("max_seq_len", "max_prompt_seq_len"),
    "stage": ("zero_stage", "actor_zero_stage"),
    "steps": ("max_train_steps",),
    "template": ("chat_template",),
    "train_batch_size": ("per_device_train_batch_size", "per_device_generation_batch_size"),
    "train_file": ("data_path",),
    "train_files": ("data_path",),
    "val_freq": ("eval_interval",),
    "wandb": ("report_to",),
    "wandb_project": ("report_to",),
    "warmup": ("warmup_ratio", "num_warmup_steps"),
    "wd": ("weight_decay", "actor_weight_decay"),
    "zero": ("zero_stage", "actor_zero_stage"),
}
_MOST = 3


def nearest_flags(name: str, names: Sequence[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for the flags in `names` that `name` may stand for, or "" if there is none:
    what people mean by it, flags with all its words, flags that are written alike."""
    plain = name.lower().replace("-", "_").replace(".", "_")
    known = [flag.replace("-", "_") for flag in names]
    words = set(plain.split("_"))
    with_words = sorted((flag for flag in known if words < set(flag.split("_"))), key=len)
    alike = difflib.get_close_matches(plain, known, n=_MOST, cutoff=0.5)
    found = [flag for flag in (*_MEANT.get(plain, ()), *alike[:1], *with_words, *alike) if flag in known]
    if alike and difflib.SequenceMatcher(None, alike[0], plain).ratio() > 0.9:  # a slip of the pen
        found = [alike[0], *found]
    shown = " or ".join(f"'{flag}'" for flag in list(dict.fromkeys(found))[:_MOST])
    return f"; did you mean {shown}?" if shown else ""
