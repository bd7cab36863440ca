"""Axolotl by its command `train`, with the tokenizer's chat template."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters.watching import PLAIN, released, watched
from benchmarks.conformance.material import save_start
from benchmarks.conformance.seen import Seen, SftCase

PACKAGES = ("axolotl", "transformers", "trl", "accelerate", "torch")
LACKS = {"ranks": "without a GPU its second rank ends: Cannot access accelerator device when none is available"}
SETTINGS = "datasets of type chat_template, roles_to_train assistant, train_on_eos turn; packed: sample_packing"
BETTER: dict[str, tuple[str, dict[str, Any]]] = {}
NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}


def versions() -> dict[str, str]:
    return released(*PACKAGES)


def sft(case: SftCase) -> Seen:
    import yaml
    from axolotl.cli.train import do_cli

    folder = Path(tempfile.mkdtemp())
    start = save_start(folder / "start", case.padding_side)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    data: dict[str, Any] = {"path": str(folder / "rows.jsonl"), "ds_type": "json"}
    if "text" in case.rows[0]:
        data["type"] = "completion"
    else:
        data |= {"type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
        data |= {"message_property_mappings": {"role": "role", "content": "content"}}
    extra = {**PLAIN, "per_device_train_batch_size": case.micro_batch, **case.extra}
    resume = extra.pop("resume_from", None)
    for name in ("report_to", "disable_tqdm", "use_cpu"):
        extra.pop(name, None)
    settings = {
        "base_model": str(start),
        "datasets": [data],
        "chat_template": "tokenizer_default",
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "sequence_len": case.max_length,
        "sample_packing": case.packing,
        "pad_to_sequence_len": bool(case.pad_to),
        "gradient_accumulation_steps": case.accumulation,
        "save_strategy": "no",
        "val_set_size": 0,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        **{NAMES.get(name, name): value for name, value in extra.items()},
    }
    if case.steps > 0:
        settings["max_steps"] = case.steps
    if case.pad_to:
        settings["sequence_len"] = case.pad_to
    if resume is not None:
        settings["resume_from_checkpoint"] = str(resume)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with watched() as seen:
        do_cli(config=str(folder / "config.yaml"))
    return seen
