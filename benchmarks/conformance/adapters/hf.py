"""transformers' Trainer with its own collators, on rows that its user has tokenized with the chat template."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters.watching import PLAIN, released, watched
from benchmarks.conformance.material import make_model, make_tokenizer
from benchmarks.conformance.seen import IGNORED, Seen, SftCase

PACKAGES = ("transformers", "accelerate", "torch")
LACKS = {"chat": "takes token ids: which of them carry loss is its user's to say"}
SETTINGS = "DataCollatorForSeq2Seq; packed: DataCollatorWithFlattening and batches of flattened rows"


def versions() -> dict[str, str]:
    return released(*PACKAGES)


def tokenized(tokenizer: Any, row: dict[str, Any], max_length: int) -> dict[str, list[int]]:
    """input_ids and labels of a row, cut at the end."""
    if "text" in row:
        ids = tokenizer(row["text"])["input_ids"]
        labels = list(ids)
    else:
        made = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        ids = list(made["input_ids"])
        masks = made["assistant_masks"]
        labels = [token if counts else IGNORED for token, counts in zip(ids, masks, strict=True)]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def sft(case: SftCase) -> Seen:
    import transformers

    tokenizer = make_tokenizer()
    tokenizer.padding_side = case.padding_side
    rows = [tokenized(tokenizer, row, case.max_length) for row in case.rows]
    collate: Any = transformers.DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=case.pad_to)
    if case.packing:
        collate = transformers.DataCollatorWithFlattening()
    extra = dict(case.extra)
    resume = extra.pop("resume_from", None)
    settings = {
        **PLAIN,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "save_strategy": "no",
        **extra,
    }
    with watched() as seen:
        trainer = transformers.Trainer(
            model=make_model(tokenizer),
            args=transformers.TrainingArguments(**settings),
            train_dataset=rows,
            data_collator=collate,
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(Path(resume)))
    return seen
