"""Threestep by its command line: rows from its records, weights from the model that it leaves.

AdamW with beta1 = 0 and an epsilon far above every gradient is plain SGD but for a share of the gradient's size over
epsilon: a learning rate of 100 over an epsilon of 10,000 moves the weights by 0.01 of the gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.conformance.adapters.watching import released
from benchmarks.conformance.material import save_start
from benchmarks.conformance.seen import IGNORED, Document, MicroBatch, PairCase, Seen, SftCase, documents, flat

STARTS_RANKS = True
LACKS = {"padding_side": "pads on the right or not at all: no setting", "label_smoothing": "SFT has no label smoothing"}
SETTINGS = "the command line with --dtype fp32, a constant learning rate and no clipping"
SGD = {"learning_rate": 1e2, "adam_epsilon": 1e4, "adam_beta1": 0.0, "weight_decay": 0.0}
# Settings of the properties, under Threestep's names.
NAMES = {"learning_rate": "learning_rate", "lr_scheduler_type": "lr_scheduler_type", "save_steps": "save_every"}


def versions() -> dict[str, str]:
    return {**released("threestep", "transformers", "deepspeed", "torch"), "commit": _commit()}


def _commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def sft(case: SftCase) -> Seen:
    """One run; of an epoch, a second one that ends after its first step, for the weights in between."""
    seen = _run(case)
    if case.steps < 0:
        seen.weights.insert(1, _run(replace(case, steps=1)).weights[-1])
    return seen


def _run(case: SftCase) -> Seen:
    extra = dict(case.extra)
    folder = Path(extra.get("output_dir") or tempfile.mkdtemp())  # a resumed run has the same paths
    flags = {
        "max_seq_len": case.max_length,
        "padded": "false" if case.packing else "true",
        "num_ranks": case.ranks,
        **({} if "optim" in extra else SGD),
        **{NAMES[name]: value for name, value in extra.items() if name in NAMES},
    }
    if "text" in case.rows[0]:
        flags["loss_on"] = "conversation"
    more = ["--resume", str(folder / "run" / "checkpoints" / "step_000002")] if "resume_from" in extra else []
    return _train("sft", case, folder, flags, more)


def _train(step: str, case: SftCase | PairCase, folder: Path, flags: dict[str, Any], more: list[str]) -> Seen:
    """Run a step by its command line. flags: beside those that all cases share."""
    start, out = folder / "start", folder / "run"
    if not start.exists():
        save_start(start)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    flags = {
        "model_name_or_path": start,
        "data_path": f"jsonl:{folder / 'rows.jsonl'}",
        "data_output_path": folder / "cache",
        "output_dir": out,
        "dtype": "fp32",
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": case.accumulation,
        "eval_fraction": 0,
        "eval_interval": 0,
        "max_grad_norm": 0,
        "lr_scheduler_type": "constant",
        "report": "false",
        **flags,
    }
    steps = 2 if case.steps < 0 else case.steps
    command = [sys.executable, "-m", "threestep", step]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command += ["--record_steps", *map(str, range(1, steps + 1)), *more]
    if case.steps > 0:
        command += ["--max_train_steps", str(case.steps), "--num_train_epochs", "inf"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:] + done.stdout[-1000:])
    seen = _read(out)
    seen.weights = [_weights(start), _weights(out / "model")]
    return seen


def dpo(case: PairCase) -> Seen:
    """One run; of an epoch, a second one as above. The reference is the model itself."""
    flags = {**SGD, "loss_type": case.loss, "beta": case.beta, "label_smoothing": case.smoothing, "max_seq_len": 256}
    seen = _train("dpo", case, Path(tempfile.mkdtemp()), flags, [])
    if case.steps < 0:
        first = _train("dpo", replace(case, steps=1), Path(tempfile.mkdtemp()), flags, [])
        seen.weights.insert(1, first.weights[-1])
    seen.reference_seed = 0
    return seen


def _weights(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return flat(load_file(str(folder / "model.safetensors")))


def _read(out: Path) -> Seen:
    from training.utils.recording.files import read_record

    seen = Seen()
    for folder in sorted((out / "records").iterdir()):
        record = read_record(folder)
        seen.batches.append(
            [_sequence(arrays, row) for arrays in record.ranks for row in range(len(arrays["lengths"]))]
        )
        seen.losses.append(float(record.head.figures["loss"]))
        seen.pairs.append([pair for arrays in record.ranks for pair in _pairs(arrays)])
    return seen


def _pairs(arrays: dict[str, Any]) -> list[tuple[Document, Document]]:
    """The pairs of a rank's record; none in SFT."""
    if "chosen" not in arrays:
        return []
    rows = [documents([_sequence(arrays, row)])[0] for row in range(len(arrays["lengths"]))]
    return [(rows[better], rows[worse]) for better, worse in zip(arrays["chosen"], arrays["rejected"], strict=True)]


def _sequence(arrays: dict[str, Any], row: int) -> MicroBatch:
    """One sequence of a record, as a row of its own; `trained`: where log-probabilities were read."""
    start = int(arrays["lengths"][:row].sum())
    places = slice(start, start + int(arrays["lengths"][row]))
    ids = torch.from_numpy(arrays["token_ids"][places]).long()[None]
    counts = torch.from_numpy(arrays["loss_mask"][places])[None]
    real = torch.from_numpy(arrays["is_real"][places])[None] if "is_real" in arrays else torch.ones_like(ids).bool()
    learned = torch.from_numpy(arrays["logprobs"][places] != 0)[None]
    trained = torch.cat([learned[:, 1:], torch.zeros_like(learned[:, :1])], 1)
    return MicroBatch(ids, real.long(), None, ids.masked_fill(~counts, IGNORED), trained)
