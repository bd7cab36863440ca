"""The steps as Python functions: several calls in one process, the command line's weights, and what a call leaves.
Calls with loaded models train what their folder does; calls that were stopped go on in every form of `resume`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.calls_program import FORMS, ORDINARY, PAIRS, ROWS, SETTINGS
from tests.end_to_end.conftest import run_step, save_start
from tests.support.forked_programs import ON_CPU, run_python

PROGRAM = Path(__file__).with_name("calls_program.py")


@pytest.fixture(scope="module")
def called(request, tmp_path_factory):
    """(its folder, what the program saw)"""
    place = save_start(tmp_path_factory.mktemp("calls") / "start").parent
    form = ["long"] if request.config.getoption("--long") else []
    ran = run_python([str(PROGRAM), str(place), *form], {**os.environ, **ON_CPU}, timeout_seconds=600 + 900 * len(form))
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return place, json.loads((place / "told.json").read_text())


def test_a_second_call_holds_no_more_than_the_first(called):
    """Nor does the thirtieth, in the long form."""
    counts = called[1]["counts"]
    assert not any(count["group"] or count["variables"] for count in counts)
    for name in ("threads", "files", "handlers"):
        assert {str(count[name]) for count in counts[0 if name == "handlers" else 1 :]} == {str(counts[1][name])}, name
    most = 2_000 if len(counts) == 3 else 10_000  # the model has 100,000
    assert max(count["elements"] for count in counts) < most


def test_each_call_has_a_folder_and_figures_of_its_own(called):
    place, told = called
    assert told["folders"][:3] == [str(place / name) for name in ("runs/sft", "runs/dpo", "again")]
    for folder in map(Path, told["folders"][:3]):
        assert (folder / "model" / "model.safetensors").is_file()
    assert told["figures"][-1] == json.loads((place / "again" / "summary.json").read_text())
    assert told["figures"][-1]["eval_loss_after"] < told["figures"][-1]["eval_loss_before"]


def test_the_command_line_gives_the_same_weights(called):
    """To the bit, from the run's own config.yaml."""
    place, _ = called
    again = place / "by_command"
    ran = run_step(1, ["--config", place / "again" / "config.yaml", "--output_dir", again])
    assert ran.code == 0, ran.words
    mine, theirs = ((folder / "model" / "model.safetensors").read_bytes() for folder in (place / "again", again))
    assert mine == theirs
    assert mine != (place / "start" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_ranks_that_a_call_launches(tmp_path, monkeypatch):
    import threestep

    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    start = save_start(tmp_path / "start")
    shared = {**SETTINGS, "data_output_path": tmp_path / "cache", "per_device_train_batch_size": 2}
    result = threestep.dpo(start, PAIRS, **shared, num_ranks=2, output_dir=tmp_path / "two")
    assert "2 ranks" in (result.folder / "config.yaml").read_text()
    assert result.figures["seconds"] > 0 and (result.model_folder / "model.safetensors").is_file()
    with pytest.raises(threestep.ThreestepError, match="^unknown argument lerning_rate; did you mean 'learning_rate'"):
        threestep.sft(start, ROWS, lerning_rate=1, num_ranks=2, output_dir=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "ppo"])
def test_an_object_is_trained_as_its_folder(called, kind):
    assert called[1]["same"][kind]


def test_what_was_given_stays_and_what_was_frozen_stays_frozen(called):
    """In shards, on other ranks and behind a resume too."""
    for name, found in called[1]["given"].items():
        assert found["as it was"], name
        assert found["frozen"] and not set(found["frozen"]) & set(found["moved"]), name
        assert found["moved"], name
        assert found["steps"][-1] == 2, name


def test_a_class_of_ones_own_is_trained_from_a_folder_with_its_code(called):
    found = called[1]["with code"]
    assert "its class is halved.Halved" in found["said"]
    assert "pass that folder with trust_remote_code=True" in found["said"]
    assert (found["kind"], found["half"]) == ("Halved", True)


@pytest.mark.parametrize(
    "kind, form",
    [
        pytest.param(kind, form, marks=[] if form in ordinary else [pytest.mark.long])
        for kind, ordinary in ORDINARY.items()
        for form in FORMS
    ],
)
def test_a_stopped_call_goes_on_in_every_form(called, kind, form):
    place, seen = called
    said = seen["stopped"][f"{kind} {form}"]
    assert f"repeat the call with resume=True, output_dir='{place}/{kind} {form}'" in said["said"]
    metrics = (place / f"{kind} unbroken" / "metrics.jsonl").read_text().splitlines()
    assert said["steps"] == [json.loads(line)["step"] for line in metrics] and max(said["steps"]) == 2
    mine, unbroken = (
        (place / f"{kind} {which}" / "model" / "model.safetensors").read_bytes() for which in (form, "unbroken")
    )
    assert mine == unbroken


_GRPO_AND_EVALUATE = """
import threestep

rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(20)]

def short(prompts, responses, **columns):
    return [-float(len(response)) for response in responses]

run = threestep.grpo(
    "start", rows, reward=short, num_samples_per_prompt=2, per_device_generation_batch_size=2, max_answer_seq_len=4,
    max_prompt_seq_len=64, max_train_steps=1, output_dir="grpo",
)
assert run.figures["reward_after"] < 0, run.figures
short_rows = {"max_prompt_seq_len": 64, "max_new_tokens": 4}
found = threestep.evaluate("reward", run.model_folder, rows, reward=short, **short_rows)
assert (found["prompts"], found["models"]) == (20, [str(run.model_folder)]) and found["reward"]["value"] < 0, found
assert threestep.evaluate("perplexity", "start", rows, max_seq_len=64, output_dir="judged")["perplexity"]["value"] > 1
for task, word in (("rewards", "did you mean 'reward'"), ("reward", "reward_model")):
    try:
        threestep.evaluate(task, "start", rows, output_dir="none", **short_rows)
    except threestep.ThreestepError as mistake:
        assert word in str(mistake), mistake
    else:
        raise AssertionError(task)
"""


@pytest.mark.needs_plugin("evaluation")
def test_grpo_and_evaluate_are_calls_too(tmp_path):
    save_start(tmp_path / "start")
    environment = {**os.environ, **ON_CPU}
    ran = run_python(["-c", _GRPO_AND_EVALUATE], environment, folder=tmp_path, timeout_seconds=240)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert (tmp_path / "judged" / "perplexity.json").is_file() and not (tmp_path / "none").exists()
    assert "advantage: grpo" in (tmp_path / "grpo" / "config.yaml").read_text()
