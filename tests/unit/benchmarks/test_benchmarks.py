"""The benchmarks' own parts, on a few made-up questions in GSM8K's form and a tiny model."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import benchmarks.__main__ as program
from benchmarks import speculation as drafting
from benchmarks.competitions import COMPETITIONS
from benchmarks.workload import Workload, make_workload
from tests.support.forked_programs import run_python

QUESTIONS = 140
ROWS = {"shape": "tiny", "max_seq_len": 512, "attn_implementation": "sdpa"}


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


def ran(command: list[str]) -> program.Measured:
    """What program._run gives, without the memory: by a fork, where that may be."""
    done = run_python(command[1:], {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, folder=program.ROOT)
    assert done.returncode == 0, done.stderr
    return program._measured(command, done.stdout.splitlines(), 0)


def test_generation_runs(workload):
    """Ours and the floor, a few tokens each; the others differ in their flags."""
    commands = COMPETITIONS["rollout"](workload, flags()).commands
    assert len(commands) == 6
    for name in ("Threestep, rows finish early", "bare decode loop"):
        run = ran([*commands[name], "--new_tokens", "3"])
        assert len(run.rates) == 2 and min(run.rates) > 0, name


@pytest.mark.parametrize(
    ("name", "done", "kept"),
    [("speculation8", "drafting", "round1"), ("speculation_embedded", "embedded_drafting", "sft")],
)
def test_rollouts_by_guesses_run(workload, monkeypatch, name, done, kept):
    """Of a model whose head is as it begins: no training."""
    from transformers import AutoModelForCausalLM

    from threestep.plugins.mtp.folder import save_head
    from threestep.plugins.mtp.head import new_head

    folder = workload.folder / done
    shutil.copytree(workload.model, folder / kept / "model")
    head = new_head(AutoModelForCausalLM.from_pretrained(workload.model), 1, 0)
    save_head(folder / kept / "model", 1, head.state_dict())
    (folder / "done").write_text(kept)

    def forked(command, **_):
        return run_python([*command[1:], "--new_tokens", "4"], {**os.environ}, folder=program.ROOT)

    monkeypatch.setattr(drafting.subprocess, "run", forked)
    competition = COMPETITIONS[name](workload, flags(steps=3))
    assert re.search(
        r"0\.\d\d of the head's guesses are right, 1\.\d\d tokens a forward, .* 1.2 times from", *competition.notes
    )
    assert list(competition.commands) == [
        "plain",
        "--speculate 1",
        "--speculate 2",
        "--speculate_by ngram",
        "--speculate auto",
    ]
    for way in ("--speculate 2", "--speculate auto"):
        run = ran([*competition.commands[way], "--new_tokens", "4"])
        assert len(run.rates) == 1 and min(run.rates) > 0, way


def test_experience_runs(workload):
    """Step 3 of four models with replaced rollouts, through the program that replaces them; its parts are told."""
    command = COMPETITIONS["experience"](workload, flags(steps=3)).commands["Threestep"]
    run = ran(command)
    assert len(run.rates) == 1 and run.parts[0]["7_learn"] > 0
    assert sum(run.parts[0].values()) == pytest.approx(1 / run.rates[0])


LONG = pytest.mark.long


_LONG_ONES = [pytest.param(name, marks=LONG) for name in ("sft", "overhead", "kto", "orpo")]


@pytest.mark.parametrize("name", [*_LONG_ONES, "ranked4"])
def test_competitors_run(name, workload):
    """Every competitor of ours trains four steps and counts what it trained on."""
    competition = COMPETITIONS[name](workload, flags())
    for competitor, command in competition.commands.items():
        if "padded" in competitor:
            continue
        if "floor_sft" in " ".join(command):  # full rows: four steps of 4,096 tokens, more than these questions have
            continue
        run = ran(command)
        assert len(run.rates) == 2 and min(run.rates) > 0, competitor
