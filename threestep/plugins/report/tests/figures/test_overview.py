"""The top of a page: what was run, on what, with which settings."""

from __future__ import annotations

import json

import yaml

from threestep.plugins.report.figures.overview import changed_settings, facts_of
from threestep.plugins.report.figures.reading import read_runs
from training.utils.flags.arguments import defaults_of
from training.utils.flags.step import known_steps


def settings_of(step: str, **changed) -> dict:
    groups = known_steps()[step].groups
    return {**defaults_of(groups), "program": known_steps()[step].program, **changed}


def test_facts_hold_no_paths_of_the_machine(sft_run):
    folder = sft_run()
    changed = {"model_name_or_path": "/home/me/start", "data_path": ["jsonl:/home/me/rows.jsonl", "org/name"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings_of("step1_sft", **changed)))
    environment = {"device": "1 rank on cpu", "started": "2026-01-02 03:04", "versions": {"torch": "2.13.0"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    assert facts_of(read_runs([folder])[0]) == [
        ("Model", "start"), ("Data", "jsonl:rows.jsonl, org/name"), ("Rows", "90 training, 90 held out"),
        ("Device", "1 rank on cpu"), ("Duration", "10.0 s (SFT 3 steps)"), ("Started", "2026-01-02 03:04"),
        ("Versions", "torch 2.13.0"),
    ]  # fmt: skip


def test_only_settings_that_are_not_defaults(sft_run):
    folder = sft_run()
    changed = {"learning_rate": 0.25, "seed": 7, "padded": True, "output_dir": "x", "dataset_module": []}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings_of("step1_sft", **changed)))
    (step,) = read_runs([folder])[0].steps
    found = {name: (value, default) for name, value, default in changed_settings(step)}
    assert found.keys() == {"learning_rate", "seed", "padded"}
    assert found["padded"] == ("true", "false") and found["learning_rate"][0] == "0.25"
