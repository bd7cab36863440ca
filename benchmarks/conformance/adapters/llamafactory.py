"""LLaMA-Factory by its entry point, with its template `qwen` (ChatML with tools)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters.watching import PLAIN, released, watched
from benchmarks.conformance.material import save_start
from benchmarks.conformance.seen import Seen, SftCase

PACKAGES = ("llamafactory", "transformers", "accelerate", "torch")
LACKS = {"padding_width": "no setting: pads to a multiple of 8", "whole_texts": "stage pt packs texts into blocks"}
SETTINGS = "template qwen, conversations of ShareGPT's form; packed: neat_packing"
BETTER: dict[str, tuple[str, dict[str, Any]]] = {
    "packing": ("neat_packing: true", {"neat_packing": True}),
}
ROLES = {"user": "human", "assistant": "gpt", "tool": "observation"}


def versions() -> dict[str, str]:
    return released(*PACKAGES)


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    """A row in ShareGPT's form, as its documentation has it: a call of a tool is a turn of its own role."""
    turns, system = [], ""
    for message in row["messages"]:
        if message["role"] == "system":
            system = message["content"]
        elif message.get("tool_calls"):
            call = json.dumps(message["tool_calls"][0]["function"])
            turns.append({"from": "function_call", "value": call})
        else:
            turns.append({"from": ROLES[message["role"]], "value": message["content"]})
    tools = [tool["function"] for tool in row.get("tools", [])]
    made = {"conversations": turns, "system": system, "tools": json.dumps(tools) if tools else ""}
    return made


def sft(case: SftCase) -> Seen:
    from llamafactory.train.tuner import run_exp

    folder = Path(tempfile.mkdtemp())
    start = save_start(folder / "start", case.padding_side)
    (folder / "rows.json").write_text(json.dumps([_conversation(row) for row in case.rows]))
    columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    information = {"rows": {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(information))
    extra = dict(case.extra)
    resume = extra.pop("resume_from", None)
    settings = {
        **PLAIN,
        "model_name_or_path": str(start),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "qwen",
        "cutoff_len": case.max_length,
        "packing": case.packing,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "save_strategy": "no",
        "disable_gradient_checkpointing": True,
        "report_to": "none",
        **extra,
    }
    settings.pop("gradient_checkpointing")
    if not case.packing:
        settings.pop("neat_packing", None)
    if resume is not None:
        settings["resume_from_checkpoint"] = str(resume)
    with watched() as seen:
        run_exp(settings)
    return seen
