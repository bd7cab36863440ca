"""The first day on a GPU, in its form for CPUs: what is recorded, and that each part measures what it says."""

from __future__ import annotations

import json
import os
from importlib import import_module
from unittest.mock import patch

import pytest
import torch

import benchmarks.gpu_day.__main__ as command
from benchmarks.gpu_day import attention, decoding, kernels, largest
from benchmarks.gpu_day.record import Report
from tests.support.forked_programs import run_python


def forked(words, variables):
    return run_python(words, {**os.environ, "OMP_NUM_THREADS": "1", **variables}, folder=command.ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu_day")


@pytest.fixture(scope="module")
def measured(folder):
    """Measures a part on tiny shapes, some of its cases or all."""

    def measure(number: int, *only: str) -> dict[str, dict]:
        report = Report(number, "a part", folder, full=False, seconds=280, only=only, run=forked)
        with patch.dict(os.environ):  # part 9 starts ranks in this process, which set it up for training
            import_module(f"benchmarks.gpu_day.{command.PARTS[number].module}").measure(report)
        return by_case(report, asked=bool(only))

    return measure


def by_case(report: Report, asked: bool = False) -> dict[str, dict]:
    """The rows by group and case, without those that were not asked for; the table has a line for every one."""
    raw = json.loads((report.out / f"part{report.part}.json").read_text())["rows"]
    table = (report.out / f"part{report.part}.md").read_text().splitlines()
    for row in raw:
        assert any(line.startswith(f"| {row['case']} |") and line.endswith(f"{row['result']} |") for line in table)
    rows = {f"{row['group']}: {row['case']}": row for row in raw}
    assert len(rows) == len(raw), "two rows with one name"
    return {name: row for name, row in rows.items() if not asked or "not asked for" not in row["result"]}


def figures(rows: dict[str, dict], name: str) -> dict:
    found = [row for key, row in rows.items() if name in key]
    assert len(found) == 1, f"{name}: {list(rows)}"
    assert found[0]["result"] == "measured", found[0]
    return found[0]["figures"]


def test_right(measured):
    rows = measured(1, "SFT, stopped", "SFT, bf16", "SFT, fp32", "llama", "response in a batch")
    half = figures(rows, "SFT, bf16")
    assert half["steps"] == 4 and 0 < half["largest"] < 0.05  # 8 bits of logits around 1: differences of some 1e-3
    assert figures(rows, "SFT, fp32")["largest"] == 0
    assert figures(rows, "SFT, stopped") == {"losses apart": 0.0, "weights apart": 0.0, "to the bit": "yes"}
    alone = figures(rows, "batch 1 and 64")
    assert alone["compared"] == alone["equal token by token"] == 3 and alone["log-probabilities of those apart"] < 1e-5
    assert figures(rows, "llama, sdpa") == {"computed by": "runs in turn", "verdict": "packs"}
    assert rows["the start-up check: llama, flex_attention"]["result"].startswith("skipped: 'flex_attention' trains on")


def test_attention(measured):
    rows = measured(2)
    for kind in attention.KINDS:
        padded = figures(rows, f"padded sdpa, {kind}")
        for width in (48, 96):
            packed = figures(rows, f": sdpa, {kind}, rows of {width}")
            assert packed["largest difference from padded, nats"] < 1e-5 and packed["rows"] < padded["rows"]
            assert packed["tokens held"] < padded["tokens held"]
            assert "trains on CUDA alone" in next(row["result"] for name, row in rows.items() if "flex" in name)
    skipped = [row for name, row in rows.items() if "kernel" in name]
    assert len(skipped) == 4 and all("runs on CUDA alone" in row["result"] for row in skipped)


def test_decoding(measured):
    rows = measured(4)
    for name in decoding.WAYS:
        found = figures(rows, f": {name}, batch 3")
        assert found["tokens/s"] == pytest.approx(3 * 5 / found["seconds"])
    with pytest.raises(AssertionError, match="5 tokens were to be drawn, and 4 were"):
        decoding.rates(lambda: torch.zeros(3, 4), decoding.request_of(3, 6, 5, 100))


def test_supervised(measured):
    rows = measured(3, "Threestep", "logits of targets", "matrix")
    ours, floor = figures(rows, "Threestep, sdpa"), figures(rows, "bare loop, logits of targets")
    assert 0 < ours["share of the matmul rate"] < 1 and figures(rows, "matrix products")["TFLOP/s"] > 0
    assert floor["Threestep, times"] == pytest.approx(ours["tokens/s"] / floor["tokens/s"])


def test_steps(measured):
    found = figures(measured(5, "GRPO, 8"), "GRPO, 8")
    parts = [value for name, value in found.items() if name not in ("seconds", "peak, GiB")]
    assert found["seconds"] == pytest.approx(sum(parts)) and len(parts) >= 7 and found["2_rollout"] > 0


def test_kernels(measured):
    rows = measured(9, kernels.PLAIN, kernels.LEAN)
    plain, lean = (figures(rows, f"a training step: {name}") for name in (kernels.PLAIN, kernels.LEAN))
    assert plain["nats apart, largest"] == lean["nats apart, largest"] == 0 < min(plain["update, s"], lean["tokens/s"])
    profile = figures(rows, "where a step's time goes")
    assert profile["kernels"] > 100 and 0 <= profile["idle"] < 1 and profile["raw"]
    drawn = figures(rows, "a rollout of 3 rows")
    assert drawn["tokens/s"] == pytest.approx(3 * 8 / drawn["seconds"]) and drawn["captures"] == 0


def test_memory(measured):
    rows = measured(6, "ZeRO 0, LoRA", "chunks", "provoked")
    assert 0 < figures(rows, "ZeRO 0, LoRA")["estimate, GiB"] < 0.1
    chunks = [row["figures"] for name, row in rows.items() if name.startswith("chunks")]
    assert [each["chunks"] for each in chunks] == [5, 1] and chunks[1]["apart from the first"] < 1e-5
    end = figures(rows, "too many rows")
    assert (end["code"], end["sentences"], end["traceback"], end["names the rows"]) == (2, 1, "no", "yes")


def test_the_largest(measured, monkeypatch):
    rows = measured(7, "LoRA")
    found = figures(rows, "tiny, LoRA, 7 steps")
    assert (
        found["steps"] == 7
        and found["losses"] == "finite"
        and found["tokens/s"] == pytest.approx(64 / found["seconds a step"])
    )
    monkeypatch.setattr(largest, "HOST_BYTES_A_WEIGHT", 1e12)
    rows = measured(7, "offload")
    assert all("needs" in row["result"] and "on the host" in row["result"] for row in rows.values()) and rows


def test_weights_go_to_another_process_and_an_end_that_is_killed_ends_the_transfer_alone(measured):
    rows = measured(8, "two ends", "vLLM")
    sent = figures(rows, "bytes a second")
    assert sent["by"] == "gloo" and sent["right"] is True and sent["GB/s"] > 0
    killed = figures(rows, "that is killed")
    assert killed["it says"] != "nothing" and killed["waited seconds"] < 3 * killed["of"]
    assert rows["a vLLM server: log-probabilities of three updates"]["result"].endswith("installed")
