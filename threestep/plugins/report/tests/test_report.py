"""The report as a program and at the end of a run: its page, its pictures, and the card of the model."""

from __future__ import annotations

import json

import pytest
import yaml

from threestep.plugins.programs import all_steps
from threestep.plugins.programs.tests.test_all_steps import VALUES, steps  # noqa: F401 (a fixture)
from threestep.plugins.report import __main__ as report
from threestep.plugins.report import writing
from threestep.plugins.report.card import base_of, model_card, write_card
from threestep.plugins.report.png import write_pngs
from threestep.plugins.report.tests.conftest import write_lines
from threestep.plugins.report.writing import end_run, report_at_end, worse_at_end, write_report
from training.utils.base.console import WARNINGS, log
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import defaults_of
from training.utils.flags.flags import marked
from training.utils.flags.step import known_steps
from training.utils.run.run_folder import EndedRun, RunFolder


def test_one_run_has_its_page_in_its_folder_and_several_where_it_is_started(sft_run, tmp_path, capsys, monkeypatch):
    one, two = (str(sft_run(name)) for name in "ab")
    report.main([one])
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'report.html'}\n"
    assert "<title>a · Threestep</title>" in (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    report.main([one, two])
    assert "a and b" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_places_and_pictures(sft_run, tmp_path, capsys):
    report.main([str(sft_run("a")), "--out", str(tmp_path / "x" / "y.html"), "--png", str(tmp_path / "png")])
    page, *pictures = capsys.readouterr().out.split()
    assert page == str(tmp_path / "x" / "y.html") and str(tmp_path / "png" / "sft_loss.png") in pictures
    assert (tmp_path / "x" / "y.html").exists() and (tmp_path / "png" / "sft_loss.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expects one or more run folders; pass the --output_dir of a run"),
        (["a", "--ouut=x"], "unknown flag --ouut; did you mean '--out'"),
        (["/no/such/run"], "expected a run's folder"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(ThreestepError, match=message):
        report.main(words)


def test_every_chart_has_a_picture(tmp_path, ppo_run):
    folder = ppo_run("$x_{$")  # no mathematics for matplotlib
    lines = [{"step": step, "rollout/score": score} for step, score in ((1, 0.5), (2, None), (3, 0.7))]
    lines += [{"step": step, "eval/check": 0.5} for step in (0, 3)]  # two values are no curve
    write_lines(folder / "metrics.jsonl", lines)
    paths = list(write_pngs([folder], tmp_path / "pictures"))
    assert [path.name for path in paths] == [
        "ppo_reward.png", "ppo_rewards_of_held_out_prompts.png", "ppo_length_and_reward.png"
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path, sft_run):
    (tmp_path / "file").write_text("")
    folder = sft_run()
    with pytest.raises(ThreestepError, match="cannot write charts to .*file/x: "):
        list(write_pngs([folder], tmp_path / "file" / "x"))
    with pytest.raises(ThreestepError, match="cannot write the report to .*file/page.html: "):
        write_report([folder], tmp_path / "file" / "page.html")


def test_the_page_is_written_whole(tmp_path, ppo_run):
    samples = [{"step": 0, "prompt": "größer \ud83d", "response": "ok", "reward": 1.0}]  # half a pair: no UTF-8
    out = write_report([ppo_run(samples=samples)], tmp_path / "new" / "page.html")
    assert "größer ?" in out.read_text(encoding="utf-8")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_at_the_end_of_a_run_where_a_failure_warns(sft_run, capsys, monkeypatch):
    folder = sft_run()
    report_at_end(folder, is_wanted=False)
    assert capsys.readouterr().out == "" and not (folder / "report.html").exists()
    report_at_end(folder, is_wanted=True)
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    assert (folder / "report.html").exists()
    monkeypatch.setattr(writing, "page", lambda *_: 1 / 0)
    report_at_end(folder, is_wanted=True)
    said = capsys.readouterr().out
    assert said.startswith("warning: no report was written (ZeroDivisionError: ") and said.count("\n") == 1


def test_a_run_that_got_worse_ends_its_last_line_so(sft_run):
    folder = sft_run()
    assert worse_at_end(folder) == worse_at_end(folder / "empty") == ""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "eval/loss": 5.5}\n')
    assert worse_at_end(folder).startswith(
        "; warning: the held-out loss was lowest after step 3 (2.4) but is 5.5 after step 3: "
    )


@pytest.mark.parametrize("trains", [True, False])
def test_a_run_ends_with_its_page_and_the_card_of_its_model(sft_run, trains):
    folder = sft_run()
    (folder / "model").mkdir()
    settings = {"report": True, "push_to_hub": False}
    assert end_run(EndedRun(RunFolder(folder, True), settings, trains)) == ""
    assert (folder / "report.html").is_file() and (folder / "model" / "README.md").is_file() == trains


def test_the_page_of_a_run_begins_with_the_warnings_of_its_log(sft_run):
    WARNINGS.clear()
    folder, sign = sft_run(), "the loss rose"
    for sentence in ("warning: 41 evaluation rows: also trained on", f"warning: step 1,200: {sign}", "data: 3 rows"):
        log(sentence)
    (folder / "divergence.jsonl").write_text(json.dumps({"step": 1200, "sentence": sign}) + "\n")
    end_run(EndedRun(RunFolder(folder, True), {"report": True, "push_to_hub": False}, False))
    top = (folder / "report.html").read_text(encoding="utf-8").partition("<main>")[0]
    assert f"{folder.name}: 41 evaluation rows: also trained on" in top and "data: 3 rows" not in top
    assert top.count(sign) == 1 and not WARNINGS


@pytest.mark.usefixtures("steps")
def test_a_whole_run_has_a_page_and_none_on_request(tmp_path, capsys):
    all_steps.main(["--config", "run.yaml"])
    assert capsys.readouterr().out.endswith("report: runs/x/report.html\n")
    page = tmp_path / "runs/x/report.html"
    assert "Step 3: PPO" in page.read_text(encoding="utf-8")
    page.unlink()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**VALUES, "report": False}))
    all_steps.main(["--config", "run.yaml", "--overwrite"])
    assert "report" not in capsys.readouterr().out and not page.exists()
    assert yaml.safe_load((tmp_path / "runs/x/configs/step1_sft.yaml").read_text())["report"] is False
    with pytest.raises(ThreestepError, match="report must be true or false, got 'no'"):
        all_steps.read_plan({**VALUES, "report": "no"}, "f")


# --- the card of a model

SFT = {**defaults_of(known_steps()["step1_sft"].groups), "model_name_or_path": "acme/base", "seed": 7}
SUMMARY = {"eval_loss_after": 1.25, "eval_loss_before": 3.0, "eval_accuracy": None}


def test_what_the_card_tells():
    settings = {**SFT, "data_path": ["hub:openai/gsm8k,config=main", "jsonl:/home/me/rows.jsonl"]}
    card = model_card(settings, SUMMARY, {"torch": "2.13"}, "acme/base")
    _, fields, text = card.split("---\n", 2)
    assert yaml.safe_load(fields) == {
        "library_name": "transformers", "base_model": "acme/base", "datasets": ["openai/gsm8k"],
        "pipeline_tag": "text-generation", "tags": ["threestep", "sft"],
    }  # fmt: skip
    assert "| eval_loss_after | 1.25 |" in text and "eval_accuracy" not in text and "torch 2.13" in text
    assert "| seed | 7 |" in text and "weight_decay" not in text
    assert text.index("eval_loss_before") < text.index("eval_loss_after") and "model_name_or_path" not in text
    assert "/home/me" not in card and "`jsonl:rows.jsonl`" in card


@pytest.mark.parametrize(
    ("start", "advantage", "expected"),
    [
        ("/home/me/runs/sft/model", "gae", ("# PPO", "`sft/model`", "ppo")),
        ("start", "grpo", ("# GRPO", "`start`", "grpo")),
        ("start", "mine.py:leave_one_out", ("# RL (leave_one_out)", "`start`", "rl-leave_one_out")),
    ],
)
def test_it_names_the_method_and_the_start_model(start, advantage, expected):
    defaults = defaults_of(known_steps()["step3_ppo"].groups)
    given = {"actor_model_name_or_path": start, "advantage": advantage, "data_path": ["embedded"]}
    _, fields, text = model_card({**defaults, **given}, {}, {}, None).split("---\n", 2)
    title, name, tag = expected
    assert f"{title}\n\nTrained with Threestep from {name} on" in text
    assert yaml.safe_load(fields)["tags"] == ["threestep", tag]


def test_it_names_objects_of_a_program_and_no_setting_that_the_program_chose(tmp_path):
    given = tmp_path / "run" / "given"
    (given / "model_name_or_path").mkdir(parents=True)
    (given / "model_name_or_path" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    settings = {"model_name_or_path": str(given / "model_name_or_path"), "data_path": [f"parquet:{given / 'rows'}"]}
    run_in(tmp_path / "run", **settings, cpu_products="onednn", num_train_epochs=7)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(marked(config.read_text(), ["cpu_products"]))
    write_card(tmp_path / "run")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "from a loaded model (LlamaForCausalLM) on rows in memory." in card
    assert "cpu_products" not in card and "| num_train_epochs | 7 |" in card
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a loaded model (LlamaForCausalLM) · rows in memory" in page
    assert "<span>cpu_products</span>" not in page and "<span>num_train_epochs</span> <b>7</b>" in page


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("as_stored", "Send one bare prompt at a time, as in its training data"),
        ("human_assistant", "Prompt it with `Human: QUESTION Assistant:`"),
        ("chat_template", "Prompt it with its chat template"),
    ],
)
def test_it_says_how_the_model_is_asked(style, words):
    own = {"data_path": ["embedded"], "prompt_style": style}
    assert words in model_card({**SFT, **own}, SUMMARY, {}, None)
    if style == "human_assistant":
        own_card = model_card({**SFT, **own}, SUMMARY, {}, None, frame=("\n\n", "\n\nAssistant:"))
        assert r"Prompt it with `'\n\nHuman: QUESTION\n\nAssistant:'`, as" in own_card
    assert "Ask it" not in model_card({**defaults_of(known_steps()["step2_reward"].groups), **own}, {}, {}, None)


def run_in(folder, **settings) -> None:
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
    for more, found in ((bomb, None), ("", "acme/base")):
        (tmp_path / "README.md").write_text(f"---\nbase_model: acme/base\n{more}---\n")
        assert base_of({**SFT, "model_name_or_path": str(tmp_path)}) == found


def test_a_card_that_cannot_be_written_is_a_line(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    write_card(tmp_path)
    assert capsys.readouterr().out.startswith("warning: no model card was written (FileNotFoundError")


def test_an_exported_part_says_its_checkpoint_and_claims_no_figures(tmp_path):
    run_in(tmp_path / "run")
    write_card(tmp_path / "run", tmp_path, ("critic", "step_000100"))
    _, fields, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(fields)["pipeline_tag"] == "text-classification"
    assert "Exported from checkpoint step_000100: the critic." in text
    assert "eval_loss_after" not in text and "| seed | 7 |" in text
    assert not (tmp_path / "run" / "model" / "README.md").exists()
