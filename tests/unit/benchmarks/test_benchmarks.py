"""The benchmarks' own parts, on a few made-up questions in GSM8K's form and a tiny model."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as program
from benchmarks import ahead, floors, startup, steady_memory
from benchmarks import speculation as drafting
from benchmarks.competitions import COMPETITIONS, Competition
from benchmarks.competitors import floor_sft
from benchmarks.endless import PROMPTS, make_endless
from benchmarks.rollout_engines import SpreadRollout
from benchmarks.workload import RANKED, VOCABULARY, Workload, make_workload
from tests.support.forked_programs import run_python
from training.utils.base.errors import ThreestepError

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


def test_only_some_competitors_run():
    three = Competition("step", {"one": ["1"], "two, with a comma": ["2"], "three": ["3"]}, ["a note"])
    assert program.selected(three, None) == three
    assert list(program.selected(three, ["three", "two, with a comma"]).commands) == ["three", "two, with a comma"]
    assert program.selected(three, ["one"]).notes == ["a note"]
    with pytest.raises(SystemExit, match="--only expects one or more of 'one', .*'three', got 'four'$"):
        program.selected(three, ["one", "four"])


def test_parts_of_a_step_are_told_beside_the_first():
    def run(*parts: dict[str, float]) -> program.Measured:
        return program.Measured([1.0] * len(parts), 0, list(parts))

    ours = run({"roll_out": 1.0, "learn": 2.0}, {"roll_out": 3.0, "learn": 4.0}, {"roll_out": 2.0, "learn": 9.0})
    # Medians 2 and 4; the other's 2 + 2 are 1.00 and 2.00 of them.
    assert program._parts_table(
        {"ours": [ours], "silent": [run({})], "other": [run({"roll_out": 2.0, "learn": 2.0, "send": 1.0})]}
    ) == [
        "| seconds a step | roll_out | learn | send |",
        "| --- | --- | --- | --- |",
        "| ours | 2.000 (1.00) | 4.000 (1.00) |  |",
        "| other | 2.000 (1.00) | 2.000 (2.00) | 1.000 |",
    ]
    assert program._parts_table({"silent": [run({})]}) == []


def test_the_share_of_sending_the_weights():
    """1 s and 2 s of steps of 10 s: 15 % in the middle."""
    parts = [{"2_rollout": 4.0, "7_learn": 6.0, "weights_to_vllm": sent} for sent in (1.0, 2.0)]
    runs = {"hf": [program.Measured([0.1], 0, [{"2_rollout": 4.0}])], "vLLM": [program.Measured([0.1] * 2, 0, parts)]}
    assert program._sending_shares(runs) == ["vLLM: sending the weights is 15.00 % of the seconds"]


def test_endless_models_never_end_nor_pad(workload):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    endless = make_endless(workload)
    assert len(rows(endless.prompts / "train.jsonl")) == PROMPTS and len(rows(endless.prompts / "test.jsonl")) == 1
    model = AutoModelForCausalLM.from_pretrained(endless.actor)
    ids = torch.randint(2, 300, (4, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        chances = model(ids).logits.double().softmax(-1)
    assert float(chances[..., :2].max()) < 1e-9  # the tokenizer's first two: end and pad
    # The others stay as even as random weights make them: 2.5 nats and more.
    assert float(-(chances * chances.clamp(min=1e-300).log()).sum(-1).mean()) > 2.5
    scorer = AutoModelForSequenceClassification.from_pretrained(endless.reward_model)
    assert scorer.config.num_labels == 1


def test_spread_rollouts():
    from training.utils.contracts.rollout_engine import RolloutRequest, Sampling

    prompts = torch.tensor([[1, 7], [8, 9]])
    mask = torch.tensor([[False, True], [True, True]])
    sampling = Sampling(256, 1.0, 0, 1.0, end_token_id=0, pad_token_id=1)
    model = argparse.Namespace(config=argparse.Namespace(vocab_size=50))
    drawn = SpreadRollout().roll_out(model, RolloutRequest(prompts, mask, sampling, list(range(8)), 4))
    # 240 / 7 apart, rounded.
    assert sorted(drawn.response_lengths_B.tolist()) == [16, 50, 85, 119, 153, 187, 222, 256]
    assert drawn.response_ids_BR.shape == (8, 256) and drawn.prompt_ids_BP[3].tolist() == [1, 7]
    assert drawn.response_ids_BR[drawn.response_mask_BR].min() == 2
    assert set(drawn.response_ids_BR[~drawn.response_mask_BR].tolist()) == {1}
    again = SpreadRollout().roll_out(model, RolloutRequest(prompts, mask, sampling, list(range(8)), 4))
    assert torch.equal(again.response_ids_BR, drawn.response_ids_BR)


HOLDING_MORE = """
import mmap, sys
from pathlib import Path
from benchmarks.rollout_engines import WatchedRollout, resident_bytes
from training.utils.generation.engines.hf import TransformersRollout

TransformersRollout.roll_out = lambda *_, **__: "drawn"
engine = WatchedRollout(None, Path(sys.argv[1]))
assert engine.roll_out() == "drawn"
held = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for _ in range(50):
    held.write(b"1" * 1_000_000)
engine.roll_out()
assert resident_bytes()[0] >= resident_bytes()[1] > 50_000_000
"""


def test_memory_is_noted_as_each_rollout_begins(tmp_path):
    """In a process of its own: what other tests left is given back when it likes."""
    file = tmp_path / "new" / "memory.txt"
    done = run_python(["-c", HOLDING_MORE, str(file)], folder=program.ROOT)
    assert done.returncode == 0, done.stderr
    (everything, own), *_ = steady_memory.read_memory(file)  # the second line: after step 0
    before = int(file.read_text().split()[1])
    assert 45_000_000 < own - before < 60_000_000 and everything >= own


def test_memory_after_step_20_beside_that_at_the_end():
    after_step = [[1_000_000 * step, 500_000 * step] for step in range(41)]
    assert steady_memory.summary(1, after_step) == (
        "rank 1, as step 20 -> 40 began: resident 19.0 -> 39.0 MB, 2.0526; of it anonymous 9.5 -> 19.5 MB, 2.0526"
    )


def test_start_up_is_told_as_medians():
    told = startup.summary({"bare": [4.0, 9.0, 3.0], "ours": [5.0, 4.5, 30.0]})
    assert told == "median: bare 4.00 s, ours 5.00 s, ratio 1.250"


def test_experience_runs(workload):
    """Step 3 of four models with replaced rollouts, through the program that replaces them; its parts are told."""
    command = COMPETITIONS["experience"](workload, flags(steps=3)).commands["Threestep"]
    run = ran(command)
    assert len(run.rates) == 1 and run.parts[0]["7_learn"] > 0
    assert sum(run.parts[0].values()) == pytest.approx(1 / run.rates[0])


@pytest.mark.parametrize("head", ["all", "targets"])
def test_the_bare_loop_takes_several_steps(head, workload, monkeypatch, capsys):
    """On rows narrow enough for these few questions."""
    monkeypatch.setattr(floor_sft, "ROWS", 2)
    monkeypatch.setattr(floor_sft, "WIDTH", 64)
    flags = ["--workload", str(workload.folder), "--steps", "3", "--head", head, "--dtype", "bf16"]
    monkeypatch.setattr(sys, "argv", ["floor_sft", *flags])
    floor_sft.main()
    assert [json.loads(line)["units"] for line in capsys.readouterr().out.splitlines()] == [128] * 3


def test_the_floor_of_the_passes(workload):
    """From the shape's numbers; the model's own weights give the same. Reusing forwards saves a third of a training."""
    from transformers import AutoModelForCausalLM

    from training.utils.models.flops import model_shape

    make_endless(workload)
    body = 2 * (4 * 64**2 + 3 * 64 * 128)
    assert floors.shape_of("tiny") == model_shape(AutoModelForCausalLM.from_pretrained(workload.model))
    # A prompt of 3 tokens with responses of 2 and 1: 6 + (2 x 3 + 3) + (3 + 1) pairs (training.utils.models.flops).
    assert floors._shared(3, [2, 1]) == (6, 19, 2) and floors._one(3, 2) == (5, 15, 2)
    a_token = floors.floor_flops("sft", workload, "tiny")["Threestep"]
    assert 6 * body < a_token < 6 * (body + 64 * VOCABULARY) + 12 * 2 * 64 * 100
    reused, plain = floors.floor_flops("ppo", workload, "tiny").values()
    tokens = PROMPTS * (floors.NEW_TOKENS + 10)
    assert plain - reused > 2 * 2 * body * tokens  # two forwards less
    assert floors.floor_flops("grpo", workload, "tiny") == {}
    assert floors.floor_lines({"ours": 4e9, "silent": 1.0}, {"ours": 0.1}, 2e9, "step") == [
        "ours: its passes' products at the 2 GFLOP/s measured here take 2 s a step, 0.20 of its time"
    ]


LONG = pytest.mark.long


def test_marked_rows_are_the_responses_of_pairs(workload):
    pairs, marked = rows(workload.pairs), rows(workload.marked())
    assert len(marked) == 2 * len(pairs)
    assert marked[:2] == [
        {"prompt": pairs[0]["prompt"], "completion": pairs[0]["chosen"], "label": True},
        {"prompt": pairs[0]["prompt"], "completion": pairs[0]["rejected"], "label": False},
    ]


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


@pytest.mark.long
@pytest.mark.timeout(300)  # on a busy machine
def test_both_forms_train_to_the_same_loss(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ahead", "--turns", "1", "--steps", "4", "--sequences", "8"])
    ahead.main()
    said = capsys.readouterr().out
    found = re.findall(r"turn 1: (\w+): [\d.]+ s between steps, [\d.]+ s of processor, last loss ([\d.]+)", said)
    assert [form for form, _ in found] == ["asked", "ahead"] and len({loss for _, loss in found}) == 1, said
