"""SFT on the chats of `start` by LLaMA-Factory or Axolotl, under the recorder; run in its environment.

python -m threestep.plugins.audit.tests.other_trainers.chat_trainers llamafactory|axolotl START FOLDER [MICRO_BATCH
ACCUMULATION]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

LEARNING_RATE, STEPS = 1e-3, 2


def llamafactory(start: Path, folder: Path, batch: int, accumulation: int) -> None:
    """Train as `llamafactory-cli train` does; its template is parsed from the tokenizer's."""
    from llamafactory.train.tuner import run_exp

    columns = {"messages": "messages"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described = {"chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}}
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(described))
    shutil.copy(start / "chats.jsonl", folder / "data")
    run_exp(
        {
            "stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": str(start / "model"),
            "dataset": "chats", "dataset_dir": str(folder / "data"), "cutoff_len": 128,
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "use_cpu": True,
            "learning_rate": LEARNING_RATE, "max_steps": STEPS, "report_to": "none", "save_strategy": "no",
            "disable_gradient_checkpointing": True, "logging_steps": 1, "overwrite_cache": True, "fp16": False,
            "disable_shuffling": True, "bf16": False,
        }
    )  # fmt: skip


def axolotl(start: Path, folder: Path, batch: int, accumulation: int) -> None:
    """Train as `axolotl train` does."""
    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    data = {"path": str(start / "chats.jsonl"), "ds_type": "json", "type": "chat_template"}
    settings: dict[str, Any] = {
        "base_model": str(start / "model"), "datasets": [data], "chat_template": "tokenizer_default",
        "sequence_len": 128, "micro_batch_size": batch, "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS, "optimizer": "adamw_torch", "learning_rate": LEARNING_RATE, "lr_scheduler": "linear",
        "bf16": False, "fp16": False, "tf32": False, "output_dir": str(folder / "out"), "save_strategy": "no",
        "logging_steps": 1, "dataset_prepared_path": str(folder / "prepared"), "sample_packing": False,
        "shuffle_merged_datasets": False, "val_set_size": 0.0, "num_epochs": 1, "curriculum_sampling": True,
        "flash_attention": False, "sdp_attention": True, "weight_decay": 0.0,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "axolotl.yml").write_text(yaml.safe_dump(settings))
    do_train(load_cfg(str(folder / "axolotl.yml")), TrainerCliArgs())


def main(argv: list[str]) -> None:
    program, start, folder = argv[0], Path(argv[1]), Path(argv[2])
    batch, accumulation = (int(word) for word in argv[3:]) if argv[3:] else (2, 2)
    import transformers

    from threestep.audit import recorded

    with recorded(transformers.Trainer, folder, steps=(1, 2)):
        {"llamafactory": llamafactory, "axolotl": axolotl}[program](start, folder, batch, accumulation)


if __name__ == "__main__":
    main(sys.argv[1:])
