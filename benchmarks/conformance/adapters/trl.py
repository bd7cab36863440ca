"""TRL's trainers, of any release since 0.12."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.conformance.adapters.watching import PLAIN, released, watched
from benchmarks.conformance.material import make_model, make_tokenizer, save_start
from benchmarks.conformance.policy_rows import POLICY, policy_batches
from benchmarks.conformance.seen import Document, MarkedCase, PairCase, PolicyCase, Seen, SftCase

PACKAGES = ("trl", "transformers", "accelerate", "torch")
LACKS: dict[str, str] = {}
SETTINGS = "assistant_only_loss=True (before 0.20: DataCollatorForCompletionOnlyLM); packed: packing=True"
# Its default multiplies the KL by the ratio, as DeepSeek-V3.2 does.
PLAIN_KL = ("use_bias_correction_kl=False", {"use_bias_correction_kl": False})
BETTER = {name: PLAIN_KL for name in ("grpo_sequence_mean", "grpo_token_mean", "grpo_constant", "grpo_bnpo")}


def versions() -> dict[str, str]:
    return released(*PACKAGES)


def sft(case: SftCase) -> Seen:
    import trl
    from datasets import Dataset

    tokenizer = make_tokenizer()
    tokenizer.padding_side = case.padding_side
    known = inspect.signature(trl.SFTConfig).parameters
    extra = dict(case.extra)
    resume = extra.pop("resume_from", None)
    defaults = extra.pop("defaults", False)
    settings = {
        **PLAIN,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "save_strategy": "no",
        "max_length" if "max_length" in known else "max_seq_length": case.max_length,
        "packing": case.packing,
        "pad_to_multiple_of": case.pad_to,
        **extra,
    }
    if case.pad_to is not None and "pad_to_multiple_of" not in known:
        raise NotImplementedError("no setting for the padded width")
    more: dict[str, Any] = {}
    chat = "messages" in case.rows[0]
    if chat and not defaults:
        if "assistant_only_loss" in known:
            settings["assistant_only_loss"] = True
        elif case.packing:
            raise NotImplementedError("this release packs without a mask of the answers")
        else:

            def formatted(batch: dict[str, Any]) -> list[str]:
                return [tokenizer.apply_chat_template(each, tokenize=False) for each in batch["messages"]]

            more["formatting_func"] = formatted
            more["data_collator"] = trl.DataCollatorForCompletionOnlyLM(
                "<|im_start|>assistant\n",
                instruction_template="<|im_start|>user\n",
                tokenizer=tokenizer,
                pad_to_multiple_of=case.pad_to,
            )
    settings = {name: value for name, value in settings.items() if value is not None and name in known}
    processing = (
        "processing_class" if "processing_class" in inspect.signature(trl.SFTTrainer).parameters else "tokenizer"
    )
    with watched() as seen:
        trainer = trl.SFTTrainer(
            model=make_model(tokenizer),
            args=trl.SFTConfig(**settings),
            train_dataset=Dataset.from_list(case.rows),
            **{processing: tokenizer},
            **more,
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(Path(resume)))
    return seen


def _preferences(kind: str, case: PairCase | MarkedCase, own: dict[str, Any], reference_seed: int) -> Seen:
    """Train by the trainer of preferences of that name, such as `DPO`. own: settings beside those of every case, left
    out where the release does not know them."""
    import trl
    from datasets import Dataset

    tokenizer, config = make_tokenizer(), getattr(trl, f"{kind}Config")
    known = inspect.signature(config).parameters
    settings = {
        **PLAIN,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "save_strategy": "no",
        "beta": case.beta,
        "max_length": 256,
        **own,
    }
    with watched() as seen:
        trainer = getattr(trl, f"{kind}Trainer")(
            model=make_model(tokenizer),
            ref_model=make_model(tokenizer, seed=reference_seed),
            args=config(**{name: value for name, value in settings.items() if name in known}),
            train_dataset=Dataset.from_list(case.rows),
            processing_class=tokenizer,
        )
        trainer.train()
    return seen


def dpo(case: PairCase) -> Seen:
    import trl

    has_several = "loss_weights" in inspect.signature(trl.DPOConfig).parameters
    own = {
        "max_steps": case.steps,
        "num_train_epochs": 1,
        "loss_type": [case.loss] if has_several else case.loss,
        "label_smoothing": case.smoothing,
    }
    seen = _preferences("DPO", case, own, reference_seed=1)
    seen.pairs = [[pair for inputs in step for pair in pairs_of(inputs)] for step in seen.inputs]
    return seen


def kto(case: MarkedCase) -> Seen:
    """The reference is a model by which z is above 0: at 0 it would be the same in every layout."""
    seen = _preferences("KTO", case, {"max_steps": 1, "learning_rate": case.rate}, reference_seed=2)
    seen.reference_seed = 2
    for inputs in seen.inputs[0]:
        rows = zip(_rows(inputs, ""), inputs["label"].tolist(), strict=True)
        seen.marked += [(row, bool(label)) for row, label in rows]
        seen.mismatched += _rows(inputs, "KL_")
    return seen


def _rows(inputs: dict[str, torch.Tensor], prefix: str) -> list[Document]:
    parts = (inputs[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
    return [
        Document(tuple(ids[mask.bool()].tolist()), tuple(completion[mask.bool()].bool().tolist()))
        for ids, mask, completion in zip(*parts, strict=True)
    ]


def pairs_of(inputs: dict[str, torch.Tensor]) -> list[tuple[Document, Document]]:
    """Pairs of a batch: one tensor, first all chosen, then all rejected; in older releases, a tensor for each part."""
    if "completion_mask" in inputs:
        rows = _rows(inputs, "")
        return list(zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True))
    parts = {
        part: [
            ids[mask.bool()].tolist()
            for ids, mask in zip(inputs[f"{part}_input_ids"], inputs[f"{part}_attention_mask"], strict=True)
        ]
        for part in ("prompt", "chosen", "rejected")
    }
    made = []
    for prompt, chosen, rejected in zip(parts["prompt"], parts["chosen"], parts["rejected"], strict=True):
        both = [Document((*prompt, *end), (False,) * len(prompt) + (True,) * len(end)) for end in (chosen, rejected)]
        made.append((both[0], both[1]))
    return made


def policy(case: PolicyCase) -> Seen:
    """GRPO's loss on fixed responses: only what would have been drawn and scored is put in."""
    import trl
    from datasets import Dataset

    tokenizer = make_tokenizer()
    known = inspect.signature(trl.GRPOConfig).parameters
    if case.reduction != "grpo" and "loss_type" not in known:
        raise NotImplementedError("this release has no choice of the loss")
    settings = {
        **PLAIN,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": 1,
        "save_strategy": "no",
        "learning_rate": POLICY["rate"],
        "beta": POLICY["beta"],
        "epsilon": POLICY["clip"],
        "loss_type": case.reduction,
        "num_generations": 2,
        "max_completion_length": POLICY["longest"],
        "mask_truncated_completions": False,
        **case.extra,
    }
    settings = {name: value for name, value in settings.items() if name in known}
    if case.reduction != "grpo" and case.reduction not in str(inspect.getsource(trl.GRPOTrainer)):
        raise NotImplementedError(f"this release has no loss_type {case.reduction}")
    batches = policy_batches(case.micro_batch)
    start = str(save_start(Path(tempfile.mkdtemp()) / "start"))
    with watched() as seen:
        trainer = trl.GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(start, torch_dtype=torch.float32),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=trl.GRPOConfig(**settings),
            train_dataset=Dataset.from_list([{"prompt": "apple"}] * 8),
            processing_class=tokenizer,
        )
        waiting = iter(batches)
        trainer._prepare_inputs = lambda rows: next(waiting)
        trainer.train()
    return seen
