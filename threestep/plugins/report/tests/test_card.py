"""The model card that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from threestep.plugins.report.card import base_of, model_card, write_card
from training.utils.flags.arguments import defaults_of
from training.utils.flags.step import known_steps

SFT = {**defaults_of(known_steps()["step1_sft"].groups), "model_name_or_path": "acme/base", "seed": 7}
SUMMARY = {"eval_loss_before": 3.0, "eval_loss_after": 1.25, "eval_accuracy": None}


def test_what_the_card_tells():
    settings = {**SFT, "data_path": ["hub:openai/gsm8k,config=main", "jsonl:/home/me/rows.jsonl"]}
    card = model_card(settings, SUMMARY, {"torch": "2.13"}, "acme/base")
    _, fields, text = card.split("---\n", 2)
    assert yaml.safe_load(fields) == {
        "library_name": "transformers",
        "base_model": "acme/base",
        "datasets": ["openai/gsm8k"],
        "pipeline_tag": "text-generation",
        "tags": ["threestep", "sft"],
    }
    assert "| eval_loss_after | 1.25 |" in text and "eval_accuracy" not in text and "torch 2.13" in text
    assert "| seed | 7 |" in text and "weight_decay" not in text
    assert "/home/me" not in card and "`jsonl:rows.jsonl`" in card


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("as_stored", "Ask it the prompt alone, as its rows have it, one at a time"),
        ("human_assistant", "Ask it `Human: QUESTION Assistant:`"),
        ("chat_template", "Ask it by its chat template"),
    ],
)
def test_it_says_how_the_model_is_asked(style, words):
    settings = {**SFT, "data_path": ["embedded"], "prompt_style": style}
    assert words in model_card(settings, SUMMARY, {}, None)
    reward = {**defaults_of(known_steps()["step2_reward"].groups), "data_path": ["embedded"], "prompt_style": style}
    assert "Ask it" not in model_card(reward, {}, {}, None)


def run_in(folder: Path, **settings) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**SFT, **settings}))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))


def test_a_later_step_names_the_model_that_the_first_began_with(tmp_path):
    run_in(tmp_path / "sft")
    write_card(tmp_path / "sft")
    start = str(tmp_path / "sft" / "model")
    assert base_of({**SFT, "model_name_or_path": start}) == "acme/base"
    run_in(tmp_path / "dpo", model_name_or_path=start, data_path=[str(tmp_path / "sft" / "config.yaml")])
    write_card(tmp_path / "dpo")
    card = (tmp_path / "dpo" / "model" / "README.md").read_text()
    assert "base_model: acme/base" in card and str(tmp_path) not in card
    assert base_of({**SFT, "model_name_or_path": str(tmp_path)}) is None


MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize("bomb", [MERGED, "a: &a [*a]\n", "[" * 5000 + "\n", "x" * (5 << 20)])
def test_a_start_models_card_that_takes_memory_is_not_read(tmp_path, bomb):
    (tmp_path / "README.md").write_text(f"---\nbase_model: acme/base\n{bomb}---\n")
    assert base_of({**SFT, "model_name_or_path": str(tmp_path)}) is None
    (tmp_path / "README.md").write_text("---\nbase_model: acme/base\n---\n")
    assert base_of({**SFT, "model_name_or_path": str(tmp_path)}) == "acme/base"


def test_a_card_that_cannot_be_written_is_a_line(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    write_card(tmp_path)
    assert capsys.readouterr().out.startswith("warning: no model card was written (FileNotFoundError")


def test_an_exported_part_says_its_checkpoint_and_claims_no_figures(tmp_path):
    run_in(tmp_path / "run")
    write_card(tmp_path / "run", tmp_path, ("critic", "step_000100"))
    _, fields, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(fields)["pipeline_tag"] == "text-classification"
    assert "Exported from its checkpoint step_000100: the critic." in text
    assert "eval_loss_after" not in text and "| seed | 7 |" in text
    assert not (tmp_path / "run" / "model" / "README.md").exists()
