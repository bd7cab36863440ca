"""TRL's trainers on the workload, in TRL's own environment (this file imports nothing of Threestep).

    python trl_peer.py --trainer sft --workload DIR --dtype fp32 --steps 10 [--mode plain|padding_free|grouped|packing]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

BATCH = 8
MODES = {
    "plain": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "packing": {"packing": True},
}


class Clock(TrainerCallback):
    """Prints the units and the seconds of each optimizer step."""

    def __init__(self) -> None:
        self.units = 0
        self.started = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        print(json.dumps({"units": self.units, "seconds": time.perf_counter() - self.started}), flush=True)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", required=True, choices=("sft", "reward"))
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mode", default="plain", choices=sorted(MODES))
    arguments = parser.parse_args()
    trainer, clock = (_sft if arguments.trainer == "sft" else _reward)(arguments)
    collate = trainer.data_collator

    def counted(features: list) -> dict:
        batch = collate(features)
        if arguments.trainer == "reward":
            clock.units = batch["input_ids"].shape[0] // 2
        elif "attention_mask" in batch:
            clock.units = int(batch["attention_mask"].sum())
        else:
            clock.units = batch["input_ids"].numel()
        return batch

    trainer.data_collator = counted
    trainer.add_callback(clock)
    trainer.train()


def _settings(arguments: argparse.Namespace) -> dict:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": BATCH,
        "max_steps": arguments.steps,
        "bf16": arguments.dtype == "bf16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_length": 512,
        "dataloader_pin_memory": False,
    }


def _sft(arguments: argparse.Namespace) -> tuple:
    from trl import SFTConfig, SFTTrainer

    workload = Path(arguments.workload)
    data = load_dataset("json", data_files=str(workload / "sft.jsonl"), split="train")
    data = data.rename_column("chosen", "completion")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(workload / "model"),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=SFTConfig(**{**_settings(arguments), **MODES[arguments.mode]}),
        train_dataset=data,
    )
    return trainer, Clock()


def _reward(arguments: argparse.Namespace) -> tuple:
    from trl import RewardConfig, RewardTrainer

    workload = Path(arguments.workload)
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(workload / "model", num_labels=1),
        processing_class=AutoTokenizer.from_pretrained(workload / "model"),
        args=RewardConfig(**_settings(arguments)),
        train_dataset=load_dataset("json", data_files=str(workload / "pairs.jsonl"), split="train"),
    )
    return trainer, Clock()


if __name__ == "__main__":
    main()
