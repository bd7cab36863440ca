"""Rounds of best of n and DPO after the steps of `threestep all`, with the programs stood in for."""

from __future__ import annotations

import json

import pytest
import yaml

from threestep.plugins.programs import all_steps
from threestep.plugins.programs.tests.test_all_steps import FIGURES, ROOT, VALUES
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import read_yaml

ROUNDS = {name: value for name, value in VALUES.items() if not name.startswith("step")} | {
    "shared": {"data_path": ["embedded"], "max_seq_len": 64},
    "dataset_module": None,
    "rounds": 2,
    "best_of": {"reward": "embedded", "num_samples_per_prompt": 4},
    "step1_sft": {"max_seq_len": 128},
    "step2_dpo": {"beta": 0.2},
}


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Stand-ins for the launched programs: they note their settings, and leave what each leaves last."""
    monkeypatch.chdir(tmp_path)
    calls: list[str] = []
    codes: dict[str, int] = {}
    left = {"best_of": ("best_of.json", {"pairs": 3}), "evaluate": ("reward.json", {"reward": {"value": 0.5}})}

    def launch(module, flags, ranks, environment):
        if module == "threestep.plugins.programs.new_model":
            return 0
        settings = read_yaml(flags[flags.index("--config") + 1])
        name, folder = module.removesuffix(".main").rpartition(".")[2], tmp_path / settings["output_dir"]
        calls.append(f"{folder.relative_to(tmp_path / 'runs/x')} {settings.get('resume', '')}".strip())
        code = codes.get(calls[-1].split()[0], 0)
        folder.mkdir(parents=True, exist_ok=True)
        file, content = left.get(name) or ("summary.json", FIGURES.get(name, {}))
        if code == 0:
            (folder / file).write_text(json.dumps(content))
        if name not in left:
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        return code

    monkeypatch.setattr(all_steps, "launch", launch)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(ROUNDS))
    return calls, codes


WHOLE = [
    "step1_sft", "rounds/0/evaluation", "rounds/1/best_of", "rounds/1/step2_dpo", "rounds/1/evaluation",
    "rounds/2/best_of", "rounds/2/step2_dpo", "rounds/2/evaluation",
]  # fmt: skip


def test_rounds_follow_the_steps(programs, tmp_path, capsys):
    calls, _ = programs
    all_steps.main(["--config", "run.yaml"])
    assert calls == WHOLE
    said = capsys.readouterr().out
    assert "== round 2 of 2, best of n" in said and "| 2 | 0.5000 | 3 | 0.7500 |" in said
    assert len(json.loads((tmp_path / "runs/x/rounds.json").read_text())["rounds"]) == 3
    with pytest.raises(ThreestepError, match="holds a finished run"):
        all_steps.main(["--config", "run.yaml"])


@pytest.mark.parametrize("content", ["", "[1]", '{"reward": {"value": "x"}}'])
def test_damaged_figures_of_a_round_are_named(programs, tmp_path, content):
    all_steps.main(["--config", "run.yaml"])
    (tmp_path / "runs/x/rounds/1/evaluation/reward.json").write_text(content)
    with pytest.raises(ThreestepError, match="runs/x/rounds.* expects"):
        all_steps.main(["--config", "run.yaml", "--resume"])


@pytest.mark.parametrize("place", range(1, len(WHOLE)))
def test_rounds_go_on_where_they_were_stopped(programs, place):
    calls, codes = programs
    codes[WHOLE[place]] = 1
    with pytest.raises(SystemExit):
        all_steps.main(["--config", "run.yaml"])
    assert calls == WHOLE[: place + 1]
    calls.clear()
    codes.clear()
    all_steps.main(["--config", "run.yaml", "--resume"])
    assert [call.split()[0] for call in calls] == WHOLE[place:]
    assert all(call.endswith(" latest") == ("step2_dpo" in call) for call in calls)


def test_rounds_of_an_earlier_run_are_refused_or_removed(programs, tmp_path):
    calls, _ = programs
    all_steps.main(["--config", "run.yaml"])
    (tmp_path / "runs/x/step1_sft/summary.json").unlink()
    with pytest.raises(ThreestepError, match="runs/x/rounds holds rounds of an earlier run; pass --resume to continue"):
        all_steps.main(["--config", "run.yaml"])
    (tmp_path / "runs/x/rounds/2/old").write_text("")
    all_steps.main(["--config", "run.yaml", "--overwrite"])
    assert calls == WHOLE * 2 and not (tmp_path / "runs/x/rounds/2/old").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 0}, "f: rounds must be a positive whole number, got 0"),
        ({"rounds": None}, "f: rounds must be a positive whole number, got None"),
        ({"best_of": ...}, "f: rounds require the section 'best_of', but it is missing; add it"),
        (
            {"step3_ppo": {}},
            "f: rounds train step2_dpo after step1_sft and step2_reward, but the file also has 'step3_ppo'; remove",
        ),
        ({"best_of": {"output_dir": "x"}}, "f: 'best_of' sets output_dir; set output_dir at the top of the file"),
    ],
)
def test_mistakes_in_rounds(change, message):
    values = {name: value for name, value in {**ROUNDS, **change}.items() if value is not ...}
    with pytest.raises(ThreestepError, match=message):
        all_steps.read_plan(values, "f")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"best_of": {"num_sample": 4}}, "best_of: .*001_best_of.yaml: unknown setting 'num_sample'"),
        ({"step2_dpo": {"beta": -1}}, "step2_dpo: --beta expects more than 0, got -1"),
    ],
)
def test_a_slip_in_a_rounds_settings_is_told_before_anything_starts(programs, tmp_path, change, message):
    calls, _ = programs
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**ROUNDS, **change}))
    with pytest.raises(ThreestepError, match=message):
        all_steps.main(["--config", "run.yaml"])
    assert calls == []


def test_rounds_by_a_reward_model_or_from_a_given_model(tmp_path):
    plan = all_steps.read_plan({**ROUNDS, "step2_reward": None, "best_of": {}}, "f")
    assert list(plan.settings) == ["step1_sft", "step2_reward"]
    assert plan.rounds.drawing == {"reward_model": "runs/x/step2_reward/model"}
    assert plan.rounds.first_model == "runs/x/step1_sft/model"
    values = {name: value for name, value in ROUNDS.items() if name not in ("new_model", "step1_sft")}
    plan = all_steps.read_plan({**values, "model_name_or_path": "my/model"}, "f")
    assert (plan.settings, plan.rounds.first_model) == ({}, "my/model")


def test_a_dry_run_shows_the_programs_of_rounds(programs, tmp_path, capsys):
    calls, _ = programs
    all_steps.main(["--config", "run.yaml", "--dry_run"])
    said = capsys.readouterr().out
    assert "== round 2 of 2, best of n\npython -m threestep.plugins.evaluation.best_of --part=2/2" in said
    assert (
        "== round 0 of 2, held-out prompts\npython -m threestep.plugins.evaluation.evaluate reward --data_split=2,4,4"
        in said
    )
    assert calls == [] and not (tmp_path / "runs").exists()


def test_rounds_are_not_chosen_by_number(programs):
    with pytest.raises(
        ThreestepError, match="--step selects steps, but the file also has rounds, which run after all steps; remove"
    ):
        all_steps.main(["--config", "run.yaml", "--step", "1"])


def test_the_settings_of_the_rounds_example_are_known(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = all_steps.read_plan(read_yaml(ROOT / "examples/iterated_dpo.yaml"), "f", str(tmp_path))
    all_steps.check_settings(all_steps.write_settings(plan))
    assert len(all_steps.prepared_rounds(plan, False, False)) == 10
