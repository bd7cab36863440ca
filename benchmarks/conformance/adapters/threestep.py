"""Threestep by its command line: rows from its records, weights from the model that it leaves.

AdamW with beta1 = 0 and an epsilon far above every gradient is plain SGD but for a share of the gradient's size over
epsilon: a learning rate of 100 over an epsilon of 10,000 moves the weights by 0.01 of the gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.conformance.adapters.watching import released
from benchmarks.conformance.material import chats, save_start
from benchmarks.conformance.policy_rows import POLICY
from benchmarks.conformance.seen import (
    IGNORED,
    Document,
    MarkedCase,
    MicroBatch,
    PairCase,
    PolicyCase,
    Response,
    Seen,
    SftCase,
    documents,
    flat,
)
from threestep.plugins.audit.recording.files import read_record

STARTS_RANKS = True
LACKS = {"padding_side": "pads on the right or not at all: no setting", "label_smoothing": "SFT has no label smoothing"}
SETTINGS = "the command line with --dtype fp32, a constant learning rate and no clipping"
SGD = {"learning_rate": 1e2, "adam_epsilon": 1e4, "adam_beta1": 0.0, "weight_decay": 0.0}
# TRL's names of GRPO's losses, which the properties have.
AGGREGATIONS = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
_OF_RESPONSES = ("token_ids", "loss_mask", "is_real", "old_logprobs", "ref_logprobs", "advantages")
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
    """Run a step and read its records, and the weights from its model."""
    own = {"model_name_or_path": folder / "start", "per_device_train_batch_size": case.micro_batch}
    out = _ran(step, case, folder, {**own, **flags}, more)
    seen = _read(out)
    seen.weights = [_weights(folder / "start"), _weights(out / "model")]
    return seen


def _ran(step: str, case: SftCase | PairCase, folder: Path, flags: dict[str, Any], more: list[str]) -> Path:
    """Run a step by its command line; returns its output folder. flags: beside those that all cases share."""
    start, out = folder / "start", folder / "run"
    if not start.exists():
        save_start(start)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    flags = {
        "data_path": f"jsonl:{folder / 'rows.jsonl'}",
        "data_output_path": folder / "cache",
        "output_dir": out,
        "dtype": "fp32",
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
    return out


def dpo(case: PairCase) -> Seen:
    """One run; of an epoch, a second one as above. The reference is the model itself."""
    flags = {**SGD, "loss_type": case.loss, "beta": case.beta, "label_smoothing": case.smoothing, "max_seq_len": 256}
    seen = _train("dpo", case, Path(tempfile.mkdtemp()), flags, [])
    if case.steps < 0:
        first = _train("dpo", replace(case, steps=1), Path(tempfile.mkdtemp()), flags, [])
        seen.weights.insert(1, first.weights[-1])
    seen.reference_seed = 0
    return seen


def kto(case: MarkedCase) -> Seen:
    """The second of two steps by its record: before the first the policy is its reference."""
    flags = {
        **SGD,
        "learning_rate": case.rate * SGD["adam_epsilon"],
        "loss_type": "kto",
        "beta": case.beta,
        "max_seq_len": 256,
        "padded": "true",
        "record_values": "true",
    }
    folder = Path(tempfile.mkdtemp())
    seen = _train("dpo", SftCase(case.rows, case.micro_batch, case.accumulation, steps=2), folder, flags, [])
    record = read_record(folder / "run" / "records" / "step_000002")
    [arrays] = record.ranks
    documents_of = [documents([_sequence(arrays, row)])[0] for row in range(len(arrays["lengths"]))]
    seen.marked = list(zip(documents_of, arrays["is_good"].tolist(), strict=True))
    seen.mismatched = _mismatched(dict(zip(arrays["rows"].tolist(), documents_of, strict=True)))
    seen.weights = [_state(record.state, part) for part in ("weights_before", "weights_after")]
    seen.reference_seed = 0
    return seen


def _mismatched(rows: dict[int, Document]) -> list[Document]:
    """Each row's prompt with the response of the row that follows in an order that depends on the number of rows."""
    order = np.random.RandomState(0).permutation(len(rows))
    made = []
    for place, number in enumerate(order):
        one, other = rows[int(number)], rows[int(order[(place + 1) % len(order)])]
        begin, after = one.counts.index(True), other.counts.index(True)
        counts = (False,) * begin + (True,) * (len(other.ids) - after)
        made.append(Document((*one.ids[:begin], *other.ids[after:]), counts))
    return made


def policy(case: PolicyCase) -> Seen:
    """The second update of a rollout, where the ratio is not 1 and the policy is not its reference, by its record. The
    responses are drawn: from the same seed by the same weights, they are the same in every layout. `--stop`: they end
    early, at many lengths."""
    if case.reduction not in AGGREGATIONS:
        raise NotImplementedError(f"has no {case.reduction}: its mean over tokens is `dapo`")
    folder = Path(tempfile.mkdtemp())
    rows = [{"messages": row["messages"][:1]} for row in chats(16)]
    flags = {
        **{name: value for name, value in SGD.items() if name not in ("learning_rate", "weight_decay")},
        "actor_model_name_or_path": folder / "start",
        "actor_learning_rate": POLICY["rate"] * SGD["adam_epsilon"],
        "advantage": "grpo",
        "reward": "length",
        "reward_length_characters": 20,
        "loss_aggregation": AGGREGATIONS[case.reduction],
        "kl_in": "loss",
        "kl_coef": POLICY["beta"],
        "clip_range": POLICY["clip"],
        "max_answer_seq_len": POLICY["longest"],
        "per_device_generation_batch_size": 2,
        "num_samples_per_prompt": 4,
        "per_device_training_batch_size": case.micro_batch,
        "padded": "true",
        "ppo_epochs": 2,
        "seed": 2,
        "record_values": "true",
        **case.extra,
    }
    out = _ran("ppo", SftCase(rows, case.micro_batch, case.accumulation), folder, flags, ["--stop", "a", "e", "i"])
    record = read_record(out / "records" / "step_000001_update2")
    forwards = int(record.ranks[0]["micro_batches"].max()) + 1
    assert forwards == case.accumulation, f"{forwards} micro-batches"
    before, after, gradient = (_state(record.state, part) for part in ("weights_before", "weights_after", "gradients"))
    return Seen(gradients=[gradient], weights=[before, after], responses=list(_responses(record.ranks[0])))


def _state(state: dict[str, Any], part: str) -> torch.Tensor:
    """One kind of a record's values, in one vector."""
    return flat({name: torch.from_numpy(value) for name, value in state.items() if name.startswith(f"{part}.")})


def _responses(arrays: dict[str, Any]) -> Iterator[Response]:
    """Yield the responses of a rank's record, whose log-probabilities stand at their tokens."""
    ends = np.cumsum(arrays["lengths"])
    for begin, end in zip(ends - arrays["lengths"], ends, strict=True):
        row = {name: torch.from_numpy(arrays[name][begin:end].copy()) for name in _OF_RESPONSES if name in arrays}
        real = row.get("is_real", torch.ones(end - begin).bool())
        drawn = row["loss_mask"] & real
        yield Response(
            row["token_ids"][real].long(),
            row["old_logprobs"][drawn],
            row["ref_logprobs"][drawn],
            float(row["advantages"][drawn][0]),
        )


def _weights(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return flat(load_file(str(folder / "model.safetensors")))


def _read(out: Path) -> Seen:
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
