"""Direct preference optimisation by its command line, on the embedded task: what it learns, says and leaves behind."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Ran, run_module, run_step
from tests.support.json_lines import read_lines, write_lines
from tests.support.new_models import save_new_model
from training.utils.contracts.rows import ResponsesRow

pytestmark = pytest.mark.timeout(900)  # on a busy machine

DATA = "--data_path embedded --data_split 0,1,0 --max_seq_len 64 --max_train_rows 1600 --max_eval_rows 100".split()
BETA = 0.2


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    """A new model of 150 thousand weights, with a tokenizer of the embedded task."""
    return save_new_model(
        place / "dpo_start", vocab_size=353, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    )


def run(place: Path, start: Path, name: str, flags: str, ranks: int = 1) -> tuple[Path, Ran]:
    folder = place / f"dpo_{name}"
    own = ["--model_name_or_path", start, "--data_output_path", place / "dpo_cache", "--output_dir", folder]
    ran = run_step("dpo", [*own, *DATA, "--dtype", "fp32", "--beta", BETA, *flags.split()], ranks)
    assert ran.code == 0, ran.words
    return folder, ran


@pytest.fixture(scope="module")
def trained(place: Path, start: Path) -> tuple[Path, Ran]:
    return run(place, start, "trained", "--learning_rate 2e-3 --per_device_train_batch_size 32")


def steps_of(folder: Path) -> list[dict]:
    return [line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line]


def said_of_reference(ran: Ran) -> list[str]:
    return [line for line in ran.stdout.splitlines() if line.startswith("reference: ")]


def embedded_rows(cache: Path, tokenizer) -> Sequence[ResponsesRow]:
    from training.utils.data.arguments import DataArguments
    from training.utils.data.build.build import build_phase
    from training.utils.flags.arguments import parse_arguments

    (data,) = parse_arguments([DataArguments], [*DATA, "--data_output_path", str(cache)], "")
    return build_phase(2, data, tokenizer, seed=1234).eval


def mean_logprob(model, row: ResponsesRow, response) -> float:
    """The log-probability of a response, a token's mean, by plain transformers."""
    import torch

    ids = torch.tensor([[*row.prompt_ids, *response]], dtype=torch.int64)
    labels = torch.where(torch.arange(ids.shape[1]) < len(row.prompt_ids), -100, ids)
    return -model(ids, labels=labels).loss.item()


def test_the_accuracy_rises(trained):
    folder, ran = trained
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval_loss_before"] == pytest.approx(math.log(2))  # the policy is its reference
    assert summary["eval_loss"] < math.log(2) - 0.01 and summary["eval_accuracy"] > 0.6
    margin = summary["eval_chosen_reward"] - summary["eval_rejected_reward"]
    assert summary["eval_reward_margin"] == pytest.approx(margin) and margin > 0.02
    before = next(line for line in read_lines(folder / "metrics.jsonl") if "eval/loss" in line)
    assert (before["step"], before["eval/accuracy"], before["eval/reward_margin"]) == (0, 0.0, 0.0)
    steps = steps_of(folder)
    assert [line["step"] for line in steps] == list(range(1, 51))
    told = ("accuracy", "reward_margin", "chosen_reward", "rejected_reward", "pairs_per_second", "mfu")
    assert steps[0].keys() >= {f"train/{name}" for name in told}
    assert said_of_reference(ran)[0].startswith("reference: computed 1,700 rows in ")
    last = ran.stdout.splitlines()[-1]
    assert last.startswith("step 2: evaluation loss 0.693 -> 0.6")
    assert f", pair accuracy {summary['eval_accuracy']:.3f}, reward margin " in last


def test_plain_transformers_finds_the_same_rewards(trained, start: Path, place: Path):
    """beta x the difference of two models' log-probabilities, one response at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = trained
    rows = embedded_rows(place / "dpo_cache", AutoTokenizer.from_pretrained(folder / "model"))
    policy, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder / "model", start))
    rewards = []
    with torch.no_grad():
        for row in rows:
            for response in row.response_ids:
                now, then = (mean_logprob(model, row, response) * len(response) for model in (policy, reference))
                rewards.append(BETA * (now - then))
    summary = json.loads((folder / "summary.json").read_text())
    chosen, rejected = rewards[::2], rewards[1::2]
    assert sum(chosen) / 100 == pytest.approx(summary["eval_chosen_reward"], abs=1e-4)
    assert sum(rejected) / 100 == pytest.approx(summary["eval_rejected_reward"], abs=1e-4)
    right = sum(better > worse for better, worse in zip(chosen, rejected, strict=True))
    assert right / 100 == pytest.approx(summary["eval_accuracy"], abs=1e-9)


def test_two_sharded_ranks_read_no_reference_again(trained, start: Path, place: Path):
    """And their first step is the one that a single rank took."""
    flags = "--zero_stage 3 --learning_rate 2e-3 --per_device_train_batch_size 16 --max_train_steps 2"
    folder, ran = run(place, start, "two_ranks", flags, ranks=2)
    assert [line.split(";")[0] for line in said_of_reference(ran)] == ["reference: 1,700 rows read from the cache"]
    one, two = (steps_of(which)[0] for which in (trained[0], folder))
    assert one["step"] == two["step"] == 1 and two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)
    assert "reference/pairs_per_second" not in (folder / "metrics.jsonl").read_text()


def test_adapters_off_read_no_reference_before(start: Path, place: Path):
    flags = "--reference adapter_off --lora_dim 4 --learning_rate 1e-2 --max_train_steps 2"
    folder, ran = run(place, start, "adapter_off", flags)
    assert said_of_reference(ran) == []
    assert json.loads((folder / "summary.json").read_text())["eval_loss_before"] == pytest.approx(math.log(2))
    steps = steps_of(folder)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2)) and abs(steps[1]["train/reward_margin"]) > 1e-6


def test_a_loss_without_a_reference_asks_for_none(trained, start: Path, place: Path):
    """Nothing is read before training, and a resumed run takes the weights of its checkpoint, not of the start."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, folder, cache = place / "planted_start", place / "dpo_planted", place / "planted_cache"
    shutil.copytree(start, model)
    given = ["--model_name_or_path", model, "--data_output_path", cache, "--output_dir", folder]
    given += [*DATA, *"--dtype fp32 --loss_type planted --beta 2 --learning_rate 2e-3 --max_train_steps".split()]
    first = run_module("tests.end_to_end.planted_loss", [*given, "2", "--save_every", "1"])
    assert first.code == 0, first.words
    assert said_of_reference(first) == [] and not list(cache.rglob("reference-*"))
    assert "reference/pairs_per_second" not in (folder / "metrics.jsonl").read_text()

    policy, losses = AutoModelForCausalLM.from_pretrained(model).eval(), []
    with torch.no_grad():
        for row in embedded_rows(cache, AutoTokenizer.from_pretrained(model)):
            better, worse = (mean_logprob(policy, row, response) for response in row.response_ids)
            losses.append(math.log1p(math.exp(-2 * (better - worse))))
    before = next(line for line in read_lines(folder / "metrics.jsonl") if "eval/loss" in line)
    assert before["eval/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)

    (model / "model.safetensors").write_bytes((place / "dpo_trained/model/model.safetensors").read_bytes())
    resumed = run_module("tests.end_to_end.planted_loss", [*given, "3", "--resume"])
    assert resumed.code == 0 and "no checkpoint" not in resumed.stdout, resumed.words
    assert [line["step"] for line in steps_of(folder)] == [1, 2, 3]


def test_marked_responses_on_one_rank_and_two(start: Path, place: Path):
    """KTO by its command line: the same losses and reference points in micro-batches of 8 and 4 on one rank and two. A
    second run finds the reference of the rows, and of their prompts with other responses."""
    asked = [(a, b) for a in ("rat", "cow", "gnu", "fox", "owl") for b in ("cat", "dog", "hen", "bee")]
    marked = [
        {"prompt": f"Human: Reverse: {a} {b} Assistant:", "completion": completion, "label": good}
        for a, b in asked
        for completion, good in ((f" {b} {a}", True), (f" {a} {b}", False))
    ]
    path = write_lines(place / "marked.jsonl", marked)
    shared = ["--model_name_or_path", start, "--data_path", f"jsonl:{path}", "--data_output_path", place / "kto_cache"]
    shared += "--max_seq_len 48 --dtype fp32 --beta 0.5 --learning_rate 3e-3 --loss_type kto".split()
    shared += "--max_train_steps 4 --num_train_epochs 3".split()
    found = []
    for name, ranks, micro in (("one", 1, "8"), ("two", 2, "2")):
        folder = place / f"kto_{name}"
        accumulation = str(16 // (int(micro) * ranks))
        flags = ["--per_device_train_batch_size", micro, "--gradient_accumulation_steps", accumulation]
        ran = run_step("dpo", [*shared, *flags, "--output_dir", folder], ranks)
        assert ran.code == 0, ran.words
        found.append(steps_of(folder))
        said = said_of_reference(ran)
        assert len(said) == 2 and all(("read from the cache" in line) is (name == "two") for line in said), said
    points = [[line["train/point_kto"] for line in run] for run in found]
    losses = [[line["train/loss"] for line in run] for run in found]
    assert losses[0][0] == pytest.approx(0.5) and points[0][0] == 0.0 and len(points[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=2e-5) and points[1] == pytest.approx(points[0], abs=2e-4)
    summary = json.loads((place / "kto_one/summary.json").read_text())
    margin = summary["eval_chosen_reward"] - summary["eval_rejected_reward"]
    assert margin == pytest.approx(summary["eval_reward_margin"])


def test_a_sum_of_losses_and_beta_over_time(start: Path, place: Path):
    flags = "--loss_type sigmoid:0.5,sft:0.25 --final_beta 0.4 --learning_rate 2e-3 --max_train_steps 3"
    folder, _ = run(place, start, "sum", flags)
    steps = steps_of(folder)
    assert [line["train/beta"] for line in steps] == pytest.approx([BETA, 0.3, 0.4])
    for line in steps:
        parts = 0.5 * line["train/loss_sigmoid"] + 0.25 * line["train/loss_sft"]
        assert line["train/loss"] == pytest.approx(parts, rel=1e-6)
    assert steps[0]["train/loss_sigmoid"] == pytest.approx(math.log(2), abs=1e-6)
