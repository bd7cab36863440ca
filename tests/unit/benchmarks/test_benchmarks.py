"""The benchmarks' own parts, on a few made-up questions in GSM8K's form and a tiny model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

import benchmarks.__main__ as program
from benchmarks.competitions import COMPETITIONS
from benchmarks.workload import RANKED, Workload, make_workload
from training.utils.run.errors import ThreestepError

QUESTIONS = 140
ROWS = {"max_seq_len": 512, "attn_implementation": "sdpa"}


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("benchmarks")
    data = folder / "data"
    data.mkdir()
    questions, solutions = [], []
    for n in range(QUESTIONS):
        question = f"Ann has {n} apples and buys {n + 3} more at the market on Monday. How many has she now?"
        answer = f"She has {n} + {n + 3} = {2 * n + 3} apples after she went to the market. #### {2 * n + 3}"
        questions.append({"question": question, "answer": answer})
        wrong = {"is_correct": False, "solution": f"She has {n} * {n + 3} = {n * (n + 3)} of them in the end."}
        solutions.append({"question": question, "ground_truth": answer, "6b": wrong})
    for name, rows in (("train.jsonl", questions), ("model_solutions.jsonl", solutions)):
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_workload(folder / "runs", "tiny", data)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flags(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"dtype": "fp32", "steps": 4, "without_trl": True, "folder": ".", **ROWS, **changed})


def test_the_workload(workload):
    assert len(rows(workload.sft)) == len(rows(workload.pairs)) == QUESTIONS
    shared, unshared = workload.tokens("pairs_half.jsonl")
    # A prompt p as long as each of two responses r: 2 (p + r) / (p + 2 r) = 4/3.
    assert unshared / shared == pytest.approx(4 / 3, rel=0.2)
    for count in RANKED:
        assert {len(row["responses"]) for row in rows(workload.ranked(count))} == {count}
        shared, unshared = workload.tokens(f"ranked{count}/rows.jsonl")
        # p = r again: K (p + r) / (p + K r) = 2 K / (K + 1), as far as characters tell tokens.
        assert unshared / shared == pytest.approx(2 * count / (count + 1), rel=0.2)


def test_a_workload_without_data(tmp_path):
    with pytest.raises(ThreestepError, match="--data_dir expects GSM8K's files, and .*train.jsonl is missing"):
        make_workload(tmp_path / "runs", "tiny", tmp_path)


def test_a_run_gives_the_steady_steps_and_the_peak_memory():
    held = 300 * 2**20
    lines = "\n".join(f'print(\'{{"units": {units}, "seconds": 2.0}}\')' for units in (1, 2, 30, 40))
    idle, holding = (
        program._run([sys.executable, "-c", f"kept = b'1' * {size}\nprint({{'other': 1}})\n{lines}"], threads=1)
        for size in (1, held)
    )
    assert holding.rates == [15.0, 20.0]
    # What a child counts before its exec is its parent's (getrusage(2)): a large parent hides a smaller child.
    assert holding.peak_bytes >= held
    if idle.peak_bytes < held // 2:
        assert holding.peak_bytes - idle.peak_bytes > held // 2


def test_a_competitor_that_fails_is_named():
    with pytest.raises(SystemExit, match="ended with code 1:\n(?s:.*)no such thing"):
        program._run([sys.executable, "-c", "raise ValueError('no such thing')"], threads=1)
    with pytest.raises(SystemExit, match="reported 0 steps; 2 of them only warm up"):
        program._run([sys.executable, "-c", "pass"], threads=1)


def test_generation_runs(workload):
    """Ours and the floor, a few tokens each; the others differ in their flags."""
    commands = COMPETITIONS["rollout"](workload, flags()).commands
    assert len(commands) == 6
    for name in ("Threestep, rows finish early", "bare decode loop"):
        run = program._run([*commands[name], "--new_tokens", "3"], threads=1)
        assert len(run.rates) == 2 and min(run.rates) > 0, name


@pytest.mark.parametrize("name", ["sft", "overhead", "ranked4"])
def test_competitors_run(name, workload):
    """Every competitor of ours trains four steps and counts what it trained on."""
    competition = COMPETITIONS[name](workload, flags())
    for competitor, command in competition.commands.items():
        if "padded" in competitor:
            continue
        if "floor_sft" in " ".join(command):  # full rows: four steps of 4,096 tokens, more than these questions have
            continue
        run = program._run(command, threads=1)
        assert len(run.rates) == 2 and min(run.rates) > 0, competitor
