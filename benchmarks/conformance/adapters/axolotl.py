"""Axolotl by its command `train`, with the tokenizer's chat template."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters.trl import pairs_of
from benchmarks.conformance.adapters.watching import PLAIN, released, watched
from benchmarks.conformance.material import save_start
from benchmarks.conformance.seen import PairCase, Seen, SftCase

PACKAGES = ("axolotl", "transformers", "trl", "accelerate", "torch")
LACKS: dict[str, str] = {}
SETTINGS = (
    "datasets of type chat_template, roles_to_train assistant, train_on_eos turn; packed: sample_packing, one row of "
    "512 tokens a micro-batch"
)
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
    folder = Path(tempfile.mkdtemp())
    data: dict[str, Any] = {"type": "completion"}
    if "text" not in case.rows[0]:
        data = {"type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
        data |= {"message_property_mappings": {"role": "role", "content": "content"}}
    extra = {**PLAIN, "per_device_train_batch_size": 1 if case.packing else case.micro_batch, **case.extra}
    resume = extra.pop("resume_from", None)
    settings = {
        **_shared(folder, case, data),
        "sequence_len": 512 if case.packing else case.pad_to or case.max_length,
        "sample_packing": case.packing,
        "pad_to_sequence_len": bool(case.pad_to),
        **_named(extra),
    }
    if resume is not None:
        settings["resume_from_checkpoint"] = str(resume)
    return _train(folder, settings, case.padding_side)


def dpo(case: PairCase) -> Seen:
    """The reference is the model itself: there is no setting for another."""
    folder = Path(tempfile.mkdtemp())
    data = {"type": "chat_template.default", "split": "train", "field_messages": "prompt"}
    settings = {
        **_shared(folder, case, data),
        "rl": "dpo",
        "rl_beta": case.beta,
        "dpo_loss_type": [case.loss],
        "dpo_label_smoothing": case.smoothing,
        "sequence_len": 256,
        **_named({**PLAIN, "per_device_train_batch_size": case.micro_batch, "num_train_epochs": 1}),
    }
    seen = _train(folder, settings)
    seen.pairs = [[pair for inputs in step for pair in pairs_of(inputs)] for step in seen.inputs]
    seen.reference_seed = 0
    return seen


def _shared(folder: Path, case: SftCase | PairCase, data: dict[str, Any]) -> dict[str, Any]:
    """Settings of both, and the rows written to the folder. data: the form of the rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    settings = {
        "base_model": str(folder / "start"),
        "datasets": [{"path": str(folder / "rows.jsonl"), "ds_type": "json", **data}],
        "chat_template": "tokenizer_default",
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "gradient_accumulation_steps": case.accumulation,
        "save_strategy": "no",
        "val_set_size": 0,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
    }
    return settings | ({"max_steps": case.steps} if case.steps > 0 else {})


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """transformers' settings under Axolotl's names, without those that it has not."""
    lacking = ("report_to", "disable_tqdm", "use_cpu")
    return {NAMES.get(name, name): value for name, value in settings.items() if name not in lacking}


def _train(folder: Path, settings: dict[str, Any], padding_side: str = "right") -> Seen:
    """As its command `train` does; on several ranks, which it would put on GPUs, the model stays on the CPU."""
    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    save_start(folder / "start", padding_side)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with watched() as seen:
        read = load_cfg(str(folder / "config.yaml"))
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            read.device_map = None
        do_train(read, TrainerCliArgs())
    return seen
