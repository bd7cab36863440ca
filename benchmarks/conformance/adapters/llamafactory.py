"""LLaMA-Factory by its entry point, with its template `qwen` (ChatML with tools)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters.watching import PLAIN, released, watched
from benchmarks.conformance.material import save_start
from benchmarks.conformance.seen import IGNORED, Document, PairCase, Seen, SftCase

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
            turns.append(_turn(message))
    tools = [tool["function"] for tool in row.get("tools", [])]
    made = {"conversations": turns, "system": system, "tools": json.dumps(tools) if tools else ""}
    return made


def sft(case: SftCase) -> Seen:
    folder = Path(tempfile.mkdtemp())
    columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    extra = dict(case.extra)
    resume = extra.pop("resume_from", None)
    settings = {
        **_shared(folder, case, [_conversation(row) for row in case.rows], {"columns": columns}),
        "stage": "sft",
        "cutoff_len": case.max_length,
        "packing": case.packing,
        **extra,
    }
    if not case.packing:
        settings.pop("neat_packing", None)
    if resume is not None:
        settings["resume_from_checkpoint"] = str(resume)
    return _train(folder, settings, case.padding_side)


def dpo(case: PairCase) -> Seen:
    folder = Path(tempfile.mkdtemp())
    rows = []
    for row in case.rows:
        turns = {name: [_turn(message) for message in row[name]] for name in ("prompt", "chosen", "rejected")}
        rows.append({"conversations": turns["prompt"], "chosen": turns["chosen"][0], "rejected": turns["rejected"][0]})
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    settings = {
        **_shared(folder, case, rows, {"ranking": True, "columns": columns}),
        "stage": "dpo",
        "cutoff_len": 256,
        "ref_model": str(save_start(folder / "reference", seed=1)),
        "pref_beta": case.beta,
        "pref_loss": case.loss,
        "dpo_label_smoothing": case.smoothing,
        "num_train_epochs": 1,
    }
    seen = _train(folder, settings)
    seen.pairs = [[pair for inputs in step for pair in _pairs(inputs)] for step in seen.inputs]
    return seen


def _turn(message: dict[str, str]) -> dict[str, str]:
    return {"from": ROLES[message["role"]], "value": message["content"]}


def _pairs(inputs: dict[str, Any]) -> list[tuple[Document, Document]]:
    """Pairs of a batch: first all chosen, then all rejected."""
    rows = []
    for ids, mask, labels in zip(inputs["input_ids"], inputs["attention_mask"].bool(), inputs["labels"], strict=True):
        rows.append(Document(tuple(ids[mask].tolist()), tuple((labels[mask] != IGNORED).tolist())))
    return list(zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True))


def _shared(folder: Path, case: SftCase | PairCase, rows: list[Any], described: dict[str, Any]) -> dict[str, Any]:
    """Settings of both, and the rows written to the folder. described: the form of the rows."""
    (folder / "rows.json").write_text(json.dumps(rows))
    information = {"rows": {"file_name": "rows.json", "formatting": "sharegpt", **described}}
    (folder / "dataset_info.json").write_text(json.dumps(information))
    settings = {
        **PLAIN,
        "model_name_or_path": str(folder / "start"),
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(folder),
        "template": "qwen",
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": case.steps,
        "save_strategy": "no",
        "disable_gradient_checkpointing": True,
        "report_to": "none",
    }
    settings.pop("gradient_checkpointing")
    return settings


def _train(folder: Path, settings: dict[str, Any], padding_side: str = "right") -> Seen:
    from llamafactory.train.tuner import run_exp

    save_start(folder / "start", padding_side)
    with watched() as seen:
        run_exp(settings)
    return seen
