"""The first day on a GPU, in its form for CPUs: what is recorded, and that each part measures what it says."""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from importlib.util import find_spec
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest
import torch

import benchmarks.gpu_day.__main__ as command
from benchmarks.gpu_day import attention, decoding, kernels, largest, memory, right, steps, traces
from benchmarks.gpu_day.models import config_of, random_model
from benchmarks.gpu_day.record import NotHere, Report
from tests.support.forked_programs import run_python
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError

LONG = pytest.mark.long


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


# --- the record


def test_the_tables_become_one_text_for_an_issue(tmp_path, monkeypatch, capsys):
    """Without rows that nobody asked for and without paths; what is too long is named."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command.main(["--out", str(tmp_path), "--block"]) == 0
    assert capsys.readouterr().out.startswith(f"No part has been measured in {tmp_path}: `python -m")
    rows = f"| a | failed: {tmp_path}/part1/x and {tmp_path}/home/y |\n| b | skipped: not asked for (--only) |\n"
    (tmp_path / "part1.md").write_text("# Part 1: right\n\n- GPU: L4, 22 GiB, CUDA 13\n\n" + rows)
    (tmp_path / "part2.md").write_text("# Part 2: attention\n" + 60_000 * "x")
    assert command.main(["--out", str(tmp_path), "--block"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("<details><summary>threestep ") and "gpu_day: L4, 22 GiB, CUDA 13</summary>" in text
    assert "| a | failed: OUT/part1/x and OUT/home/y |" in text and "| b |" not in text
    assert "Too long for an issue, attach: part2.md" in text and "xxx" not in text and len(text) < 65_536


def refuse(problem: Exception):
    def measure():
        raise problem

    return measure


def test_every_case_is_a_row_that_says_how_it_ended(tmp_path):
    report = Report(1, "a part", tmp_path, False, 60, {"GPU": "none"}, only=("kept",))
    assert report.case("g", "kept: two figures", lambda: {"seconds": 1234.5, "share": 0.123456, "raw": [1]}) is not None
    assert report.case("g", "kept: large", refuse(torch.OutOfMemoryError("CUDA out of memory"))) is None
    report.case("g", "kept: wrong", refuse(ThreestepError("--a expects b, got c")))
    report.case("g", "kept: broken", refuse(KeyError("k")))
    report.case("h", "kept: absent", refuse(NotHere("vllm is not installed")))
    report.case("h", "other", lambda: {})
    rows = by_case(report)
    assert [row["result"] for row in rows.values()] == [
        "measured", "out of memory", "failed: --a expects b, got c", "failed: KeyError: 'k'",
        "skipped: vllm is not installed", "skipped: not asked for (--only)",
    ]  # fmt: skip
    table = (tmp_path / "part1.md").read_text()
    assert "| kept: two figures | 1,234 | 0.123 | measured |" in table and "- GPU: none" in table
    assert rows["g: kept: two figures"]["figures"]["raw"] == [1] and "raw" not in table
    assert "Traceback" in rows["g: kept: broken"]["trace"]


def test_a_part_ends_at_its_deadline_with_what_it_has(tmp_path):
    report = Report(2, "a part", tmp_path, False, seconds=60)
    report.case("g", "quick", lambda: {"n": 1})
    report.seconds -= report.left_seconds - 0.5
    started, over = time.monotonic(), f"the part's {report.seconds:g} s were over"
    report.case("g", "slow", lambda: time.sleep(30) or {})
    report.case("g", "late", lambda: {"n": 2})
    assert time.monotonic() - started < 5
    rows = by_case(report)
    assert figures(rows, "quick") == {"n": 1}
    assert rows["g: slow"]["result"] == f"ended: {over}"
    assert rows["g: late"]["result"] == f"skipped: {over}"


def test_the_command_runs_a_part_until_its_time_is_over(tmp_path, capsys):
    assert command.main(["4", "--out", str(tmp_path), "--minutes", "0"]) == 0
    out = capsys.readouterr()
    assert "| captured steps in fixed places | skipped: the part's 0 s were over |" in out.out
    head = json.loads((tmp_path / "part4.json").read_text())["head"]
    assert head["Python"] == ".".join(map(str, os.sys.version_info[:3])) and "transformers" in head["packages"]
    assert f"Python: {head['Python']}" in out.err
    with pytest.raises(SystemExit):
        command.main(["10"])
    assert "argument PART: expected one of 1, 2, 3, 4, 5, 6, 7, 8, 9, got 10" in capsys.readouterr().err


def test_without_a_part_each_runs_in_a_process_of_its_own(monkeypatch, tmp_path):
    """Also after one that ended by itself."""
    started = []

    def start(words, **_):
        started.append(words[words.index("benchmarks.gpu_day") + 1 :])
        return CompletedProcess(words, int(words[3] == "2"))

    monkeypatch.setattr(command.subprocess, "run", start)
    assert command.main(["--out", str(tmp_path), "--only", "a", "b"]) == 1
    assert [words[0] for words in started] == ["1", "2", "3", "4", "5", "6", "7", "8", "9"]
    assert started[0][1:] == [f"--out={tmp_path}", "--minutes=8.0", "--only", "a", "b"]


# --- the parts


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


@LONG
def test_right_in_all_its_cases(measured):
    rows = measured(1)
    assert figures(rows, "pytest -m gpu")["failed"] == 0 and figures(rows, "pytest -m gpu")["skipped"] > 0
    for name in ("reward model, bf16", "DPO, bf16", "PPO, bf16"):
        assert figures(rows, name)["first step apart"] < 0.05
    assert figures(rows, "deterministic kernels alone")["losses apart"] == 0


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


def test_documents_fit_the_rows():
    for kind in attention.KINDS:
        for tokens, width in ((96, 48), (32768, 2048)):
            rows = attention.in_rows(attention.documents_of(kind, tokens, 100), width)
            held = [sum(document.tokens for document in row) for row in rows]
            assert max(held) <= width and 0.7 * tokens < sum(held) <= tokens


def test_runs_of_dense_attention():
    """At the bottom right the last query sees every key; at the top left the first sees the first key alone."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, h, 8, generator=generator) for n, h in ((5, 4), (9, 2), (9, 2)))
    lengths = ((2, 3), (4, 5))
    right_end = attention.dense_runs(query, key, value, *lengths, "bottom right")
    left_end = attention.dense_runs(query, key, value, *lengths, "top left")
    for begin, (q, k) in zip((0, 4), ((1, 4), (4, 5)), strict=True):
        keys, values = (part[begin : begin + k].repeat_interleave(2, 1) for part in (key, value))
        weights = (torch.einsum("ad,kad->ak", query[q], keys) / 8**0.5).softmax(-1)
        torch.testing.assert_close(right_end[q], torch.einsum("ak,kad->ad", weights, values))
    torch.testing.assert_close(left_end[0], value[0].repeat_interleave(2, 0))
    square = attention.dense_runs(query, query, query, (5,), (5,), "bottom right")
    heads = (part.transpose(0, 1)[None] for part in (query, query, query))
    plain = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    torch.testing.assert_close(square, plain[0].transpose(0, 1))


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


@LONG
def test_supervised_in_all_its_cases(measured):
    rows = measured(3)
    for name in ("reward", "dpo"):
        found = figures(rows, f"pairs a second: {name}")
        assert found["ratio of tokens"] > 1 and found["share of it"] == pytest.approx(
            found["gain"] / found["ratio of tokens"]
        )
    assert "trl is not installed" in rows["SFT, tokens a second: TRL, grouped, weights in float32"]["result"]


def test_the_times_of_a_trace_add_up():
    """4 of 10 us a product, in which a copy lies; 1 idle; then 2 attention, 2 idle, and 1 of something else."""
    spans = (("gemm_bf16", 0, 4), ("copy_kernel", 1, 2), ("flash_fwd", 5, 2), ("silu", 9, 1))
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in spans]
    others = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 90}, {"ph": "M", "name": "process"}]
    found = traces.times_of([*others, *reversed(events)], "kernel")
    assert found == {
        "span, ms": 0.01, "idle": 0.3, "longest gap, ms": 0.002,
        "matrix products": 0.4, "attention": 0.2, "elementwise and others": 0.1,
    }  # fmt: skip
    assert sum(value for name, value in found.items() if "ms" not in name) == pytest.approx(1)
    with pytest.raises(NotHere, match="no event of the kind 'kernel'"):
        traces.times_of(others, "kernel")


def test_steps(measured):
    found = figures(measured(5, "GRPO, 8"), "GRPO, 8")
    parts = [value for name, value in found.items() if name not in ("seconds", "peak, GiB")]
    assert found["seconds"] == pytest.approx(sum(parts)) and len(parts) >= 7 and found["2_rollout"] > 0


@LONG
def test_steps_in_all_their_cases(measured):
    rows = measured(5)
    assert all(figures(rows, name)["7_learn"] > 0 for name in steps.RUNS)


def test_kernels(measured):
    rows = measured(9, kernels.PLAIN, kernels.LEAN)
    plain, lean = (figures(rows, f"a training step: {name}") for name in (kernels.PLAIN, kernels.LEAN))
    assert plain["nats apart, largest"] == lean["nats apart, largest"] == 0 < min(plain["update, s"], lean["tokens/s"])
    profile = figures(rows, "where a step's time goes")
    assert profile["kernels"] > 100 and 0 <= profile["idle"] < 1 and profile["raw"]
    drawn = figures(rows, "a rollout of 3 rows")
    assert drawn["tokens/s"] == pytest.approx(3 * 8 / drawn["seconds"]) and drawn["captures"] == 0


def test_kernels_leave_the_model_as_it_was():
    model = tiny_causal_lm("llama")
    for name in (kernels.LEAN, kernels.PLAIN):
        with kernels.WAYS[name](model):
            assert any("forward" in vars(part) for part in model.modules()) == (name == kernels.LEAN)
        assert not any("forward" in vars(part) for part in model.modules())


def test_kernels_that_are_not_installed_are_a_row(measured):
    if find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    rows = measured(9, f"a training step: {kernels.FUSED}")
    assert "liger-kernel cannot be imported" in rows[f"a training step: {kernels.FUSED}"]["result"]


@LONG
def test_compiled_blocks(measured):
    rows = measured(9, f"a training step: {kernels.PLAIN}", "compiled")
    assert figures(rows, "compiled")["nats apart, largest"] < 1e-4


def test_memory(measured):
    rows = measured(6, "ZeRO 0, LoRA", "chunks", "provoked")
    assert 0 < figures(rows, "ZeRO 0, LoRA")["estimate, GiB"] < 0.1
    chunks = [row["figures"] for name, row in rows.items() if name.startswith("chunks")]
    assert [each["chunks"] for each in chunks] == [5, 1] and chunks[1]["apart from the first"] < 1e-5
    end = figures(rows, "too many rows")
    assert (end["code"], end["sentences"], end["traceback"], end["names the rows"]) == (2, 1, "no", "yes")


def test_the_estimate_is_read_from_its_last_line():
    said = "  weights   1.000   -\n  most at once   3.000   -\n\n  most at once   1,013.5     12.0\n"
    assert memory.most_at_once(said) == 1013.5
    with pytest.raises(ThreestepError, match="no line 'most at once'"):
        memory.most_at_once("fits\n")


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


def test_growth_is_that_after_the_warm_up():
    lines = [
        {"seconds": 2.0, "peak_bytes": 2**30, "bytes_after": 2**20 * held, "tokens": 64, "loss": 1.0}
        for held in range(8)
    ]
    found = largest.summary(lines, 10**9)
    assert (found["grown, MiB"], found["peak, GiB"], found["tokens/s"]) == (2.0, 1.0, 32.0)


def test_shapes_have_the_weights_of_their_names():
    model = random_model("tiny", torch.float32, torch.device("cpu"))
    assert largest.weights_of("tiny") == sum(part.numel() for part in model.parameters())
    for shape, billions in (("1300m", 1.36), ("7b", 6.74), ("8b", 8.03), ("14b", 14.77), ("32b", 32.76)):
        assert largest.weights_of(shape) / 1e9 == pytest.approx(billions, rel=0.01)
    assert config_of("8b").num_key_value_heads == 8


def test_a_run_that_fails_is_a_sentence(tmp_path):
    """And out of memory is told from other ends."""
    from benchmarks.gpu_day.programs import ran

    for said, kind in (("a\nerror: --x expects y", ThreestepError), ("error: out of memory in a forward", MemoryError)):
        report = Report(
            1, "", tmp_path, False, 9, run=lambda words, given, said=said: CompletedProcess(words, 2, "", said)
        )
        with pytest.raises(kind, match=said.splitlines()[-1][:12]):
            ran(report, ["-m", "threestep.plugins.inspect.preview"])


def test_a_stopped_run_is_laid_out_as_it_was(tmp_path):
    run = tmp_path / "run"
    for step in (2, 4):
        (run / "checkpoints" / f"step_{step:06d}" / "model").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step_000004")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)))
    (run / "model").mkdir()
    right._copy_half(run, tmp_path / "half", 2)
    half = tmp_path / "half"
    assert (half / "checkpoints" / "latest").read_text() == "step_000002" and not (half / "model").exists()
    assert (half / "checkpoints" / "step_000002" / "model").is_dir()
    assert [path.name for path in (half / "checkpoints").glob("step*")] == ["step_000002"]
    assert len((half / "metrics.jsonl").read_text().splitlines()) == 3
