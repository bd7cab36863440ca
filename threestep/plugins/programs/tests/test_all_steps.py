"""The program that runs the three steps from one YAML file; the steps themselves are stand-ins here."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml

from threestep.plugins.programs import all_steps
from threestep.plugins.programs.new_model import GROUPS
from training.utils.base.console import COMMAND_VARIABLE, OWN_WORDS_VARIABLE, WHOLE_RUN_VARIABLE
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments, read_yaml, words_of

VALUES = {
    "output_dir": "runs/x",
    "ranks": 2,
    "dataset_module": "examples/gsm8k.py",
    "new_model": {"vocab_size": 512, "pad_is_eos": True},
    "shared": {"data_path": ["gsm8k"], "max_seq_len": 64},
    "step1_sft": {"max_seq_len": 128},
    "step2_reward": None,
    "step3_ppo": {"ppo_epochs": 2},
}
ROOT = Path(__file__).parents[4]
FIGURES = {
    "step1_sft": {"eval_loss_before": 6.5, "eval_loss_after": 1.25, "seconds": 9},
    "step2_reward": {"eval_accuracy": 0.9, "eval_score_gap": 2.0, "seconds": 9},
    "step2_dpo": {"eval_accuracy": 0.75, "eval_reward_margin": 0.5, "seconds": 9},
    "step3_ppo": {
        "reward_before": -0.5, "reward_after": 1.5, "reward_standard_error": 0.125,
        "checker_before": 0.25, "checker_after": 0.5, "seconds": 9,
    },
}  # fmt: skip


@dataclasses.dataclass
class Flags:
    """What the stand-ins for the steps take."""

    output_dir: str = ""
    seed: int = 1234
    data_path: list[str] = dataclasses.field(default_factory=list)
    dataset_module: list[str] = dataclasses.field(default_factory=list)
    max_seq_len: int = 512
    ppo_epochs: int = 1
    report: bool = True
    resume: str = ""
    model_name_or_path: str = ""
    actor_model_name_or_path: str = ""
    critic_model_name_or_path: str = ""


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Stand-ins for the launched programs: they note the call, and leave the figures of a step."""
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[str, list[str], int | None]] = []
    codes: dict[str, int] = {}

    def launch(module, flags, ranks, environment):
        calls.append((module, list(flags), ranks))
        assert (environment is None) == (module == "threestep.plugins.programs.new_model")
        assert environment is None or environment[WHOLE_RUN_VARIABLE] == "1"
        assert WHOLE_RUN_VARIABLE not in os.environ
        name = module.split(".")[1]
        if name in FIGURES and not codes.get(module):
            settings = yaml.safe_load(open(flags[1], encoding="utf-8"))
            folder = tmp_path / settings["output_dir"]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(json.dumps(FIGURES[name]))
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        return codes.get(module, 0)

    monkeypatch.setattr(all_steps, "launch", launch)
    monkeypatch.setattr(
        all_steps, "parse_arguments", lambda _, *others, **more: parse_arguments((Flags,), *others, **more)
    )
    write_run(tmp_path, VALUES)
    return calls, codes


def write_run(folder: Path, values: dict) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


def test_each_step_is_fed_with_the_one_before():
    settings = all_steps.read_plan(VALUES, "run.yaml", seed=7).settings
    common = {"data_path": ["gsm8k"], "dataset_module": "examples/gsm8k.py", "seed": 7}
    assert settings["step1_sft"] == {
        **common, "max_seq_len": 128, "model_name_or_path": "runs/x/new_model", "output_dir": "runs/x/step1_sft",
    }  # fmt: skip
    assert settings["step2_reward"] == {
        **common, "max_seq_len": 64, "model_name_or_path": "runs/x/step1_sft/model",
        "output_dir": "runs/x/step2_reward",
    }  # fmt: skip
    assert settings["step3_ppo"] == {
        **common, "max_seq_len": 64, "ppo_epochs": 2, "actor_model_name_or_path": "runs/x/step1_sft/model",
        "critic_model_name_or_path": "runs/x/step2_reward/model", "output_dir": "runs/x/step3_ppo",
    }  # fmt: skip
    other = {**VALUES, "step2_reward": {"model_name_or_path": "elsewhere"}}  # a section may name another model
    assert all_steps.read_plan(other, "f").settings["step2_reward"]["model_name_or_path"] == "elsewhere"
    given = {name: value for name, value in VALUES.items() if name != "new_model"} | {"model_name_or_path": "my/model"}
    plan = all_steps.read_plan(given, "f")
    assert plan.new_model is None and plan.settings["step1_sft"]["model_name_or_path"] == "my/model"
    assert "seed" not in plan.settings["step1_sft"]  # the steps' own default holds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step1": {}}, "f: unknown section 'step1'; did you mean 'step1_sft'"),
        ({"ranks": "two"}, "ranks must be a positive whole number, got 'two'"),
        ({"ranks": True}, "ranks must be a positive whole number, got True"),
        ({"output_dir": None}, "output_dir must be a folder, got None"),
        ({"shared": ["data_path"]}, r"'shared' must contain settings, got \['data_path'\]"),
        ({"model_name_or_path": "m"}, "set either model_name_or_path .* or new_model .*, got both"),
        ({"step1_sft": {"output_dir": "o"}}, "'step1_sft' sets output_dir; set output_dir at the top"),
        ({"shared": {"seed": 3}}, "'shared' sets seed; set seed at the top of the file, or --seed"),
        ({"resume": "runs/x/step_000001"}, "resume must be true or false, got 'runs/x/step_000001'; to resume"),
        ({"shared": {"resume": True}}, "'shared' sets resume, which would resume training in steps that"),
        ({"step2_dpo": {}}, "(?s)leading up to 'step2_dpo' .*found 'step2_reward'; .*found 'step3_ppo'; remove"),
    ],
)
def test_mistakes_are_told(change, message):
    with pytest.raises(ThreestepError, match=message):
        all_steps.read_plan({**VALUES, **change}, "f")
    with pytest.raises(ThreestepError, match="(?s)unknown section 'rank'.*output_dir must be.*got neither$"):
        all_steps.read_plan({"rank": 2}, "f")
    with pytest.raises(ThreestepError, match="got neither; move model_name_or_path from 'step1_sft' to the top of the"):
        all_steps.read_plan({"step1_sft": {"model_name_or_path": "m"}}, "f")


@pytest.fixture
def without_steps(monkeypatch, tmp_path):
    """A folder of pairs in which dry_run(changes, words) looks at a run, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(all_steps, "visible_gpus", lambda environment: [])
    for variable in ("THREESTEP_RANKS", "THREESTEP_HOSTFILE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "pairs.csv").write_text("question,answer,rejected\na,b,c\n" * 9)

    def dry_run(changes: dict, *words: str) -> None:
        values = {"output_dir": "out", "new_model": {}, "shared": {"data_path": "csv:pairs.csv"}, **changes}
        write_run(tmp_path, {name: value for name, value in values.items() if value is not None})
        before = set(tmp_path.rglob("*"))
        try:
            all_steps.main(["--config", "run.yaml", "--dry_run", *words])
        finally:
            assert set(tmp_path.rglob("*")) == before

    return dry_run


def test_a_whole_run(steps, tmp_path, capsys):
    calls, _ = steps
    all_steps.main(["--config", "run.yaml", "--seed", "3"])
    assert [call[0] for call in calls] == [
        "threestep.plugins.programs.new_model", "training.step1_sft.main", "training.step2_reward.main",
        "training.step3_ppo.main",
    ]  # fmt: skip
    assert [call[2] for call in calls] == [1, 2, 2, 2]
    new_model_flags = calls[0][1]
    assert "--vocab_size=512" in new_model_flags and "--seed=3" in new_model_flags
    assert new_model_flags[new_model_flags.index("--data_path") + 1] == "gsm8k"
    assert f"--out={'runs/x/new_model'}" in new_model_flags

    summary = json.loads((tmp_path / "runs/x/summary.json").read_text())
    seconds = {name: summary.pop(name) for name in ("seconds_sft", "seconds_reward", "seconds_ppo")}
    assert all(value >= 0 for value in seconds.values())
    assert summary == {
        "sft_eval_loss_before": 6.5, "sft_eval_loss_after": 1.25, "reward_pair_accuracy": 0.9,
        "reward_sft": -0.5, "reward_ppo": 1.5, "reward_standard_error": 0.125,
        "checker_sft": 0.25, "checker_ppo": 0.5,
    }  # fmt: skip
    table = capsys.readouterr().out
    assert "| step 1: SFT loss " in table and "6.5000" in table and "1.2500" in table
    assert "the exact checker" in table and "standard error of the difference: 0.1250" in table


def test_switches_of_plugins_reach_every_step_and_the_end(steps, tmp_path, monkeypatch):
    ended: list[object] = []
    monkeypatch.setattr(all_steps, "SWITCHES", {"drawn": "false: no pictures", "told": "false: not told"})
    monkeypatch.setattr(all_steps, "TOP_LEVEL", {**all_steps.TOP_LEVEL, **all_steps.SWITCHES})
    monkeypatch.setattr(all_steps, "hooks", lambda name: [lambda *given: ended.append((name, *given))])
    monkeypatch.setattr(all_steps, "check_settings", lambda files: {})
    write_run(tmp_path, {**VALUES, "drawn": False})
    all_steps.main(["--config", "run.yaml"])
    assert ended == [("at_end_of_all", Path("runs/x"), {"drawn": False, "told": True})]
    settings = yaml.safe_load((tmp_path / "runs/x/configs/step1_sft.yaml").read_text())
    assert settings["drawn"] is False and "told" not in settings
    with pytest.raises(ThreestepError, match="told must be true or false, got 'no'"):
        all_steps.read_plan({**VALUES, "told": "no"}, "f")


def test_a_slip_in_any_steps_settings_is_told_before_anything_starts(steps, tmp_path):
    calls, _ = steps
    values = {**VALUES, "step1_sft": {"max_seq_len": "long"}, "step3_ppo": {"ppo_epoch": 2}}
    write_run(tmp_path, values)
    with pytest.raises(ThreestepError) as told:
        all_steps.main(["--config", "run.yaml"])
    assert "2 mistakes" in str(told.value)
    assert "step1_sft: " in str(told.value) and "'long'" in str(told.value)
    assert "step3_ppo: " in str(told.value)
    assert "unknown setting 'ppo_epoch'; did you mean 'ppo_epochs'" in str(told.value)
    assert calls == []


def test_the_first_failure_ends_the_run(steps, tmp_path, capsys):
    calls, codes = steps
    codes["training.step2_reward.main"] = 3
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/summary.json").write_text("an earlier run's")
    with pytest.raises(SystemExit) as end:
        all_steps.main(["--config", "run.yaml"])
    assert end.value.code == 3
    assert calls[-1][0] == "training.step2_reward.main"
    told = capsys.readouterr().err
    assert "step 2 of 3, reward model (training.step2_reward.main) exited with code 3" in told
    assert not (tmp_path / "runs/x/summary.json").exists()


def test_finished_steps_are_replaced_if_asked_for(steps, tmp_path, monkeypatch):
    calls, _ = steps
    all_steps.main(["--config", "run.yaml"])
    calls.clear()
    with pytest.raises(ThreestepError, match="step1_sft: .* holds a finished run .*, or --resume to skip finished"):
        all_steps.main(["--config", "run.yaml"])
    (tmp_path / "runs/x/step1_sft/summary.json").unlink()
    with pytest.raises(ThreestepError, match="step2_reward: .* holds a finished run .*or add --overwrite to replace"):
        all_steps.main(["--config", "run.yaml"])
    assert calls == []
    all_steps.main(["--config", "run.yaml", "--overwrite"])
    assert len(calls) == 4 and all("--overwrite" in call[1] for call in calls[1:])
    monkeypatch.setattr(all_steps, "launch", lambda *_: 0)  # an old figure is never taken for one of these
    with pytest.raises(ThreestepError, match="step1_sft finished, but its metrics could not be read: "):
        all_steps.main(["--config", "run.yaml", "--overwrite"])


def test_a_step_that_was_stopped_ends_the_run_and_goes_on_with_the_same_new_model(steps, tmp_path, monkeypatch, capsys):
    calls, _ = steps
    for name in ("step1_sft/checkpoints/latest", "new_model/config.json"):
        (tmp_path / "runs/x" / name).parent.mkdir(parents=True)
        (tmp_path / "runs/x" / name).write_text("step_000001")
    with monkeypatch.context() as patched:
        patched.setattr(all_steps, "launch", lambda module, *_: calls.append((module,)) or 0)
        with pytest.raises(SystemExit) as end:
            all_steps.main(["--config", "run.yaml"])
    assert end.value.code == 0
    assert calls == [("threestep.plugins.programs.new_model",), ("training.step1_sft.main",)]
    assert "was stopped and wrote a checkpoint; later steps were not started" in capsys.readouterr().out
    calls.clear()
    all_steps.main(["--config", "run.yaml", "--resume"])
    assert [call[0].split(".")[1] for call in calls] == ["step1_sft", "step2_reward", "step3_ppo"]
    calls.clear()
    all_steps.main(["--config", "run.yaml", "--overwrite"])
    assert calls[0][0] == "threestep.plugins.programs.new_model"


def test_a_stopped_run_is_resumed_with_all_its_seconds(steps, tmp_path, monkeypatch, capsys):
    calls, _ = steps
    ending_well, clock = all_steps.launch, [0.0]
    monkeypatch.setattr(all_steps.time, "monotonic", lambda: clock[0])

    def launch(module, *others):
        clock[0] += 10.0
        if module != "training.step2_reward.main" or "--resume" in argv:
            return ending_well(module, *others)
        folder = tmp_path / "runs/x/step2_reward/checkpoints"
        folder.mkdir(parents=True)
        (folder / "latest").write_text("step_000001")
        return 0

    monkeypatch.setattr(all_steps, "launch", launch)
    argv = ["--config", "run.yaml"]
    with pytest.raises(SystemExit):
        all_steps.main(argv)
    assert (
        "\nto resume: python -m threestep.plugins.programs.all_steps --config run.yaml --resume\n"
        in capsys.readouterr().out
    )
    calls.clear()
    argv.append("--resume")
    all_steps.main(argv)
    assert [call[0] for call in calls] == ["training.step2_reward.main", "training.step3_ppo.main"]
    assert yaml.safe_load((tmp_path / "runs/x/configs/step2_reward.yaml").read_text())["resume"] == "latest"
    summary = json.loads((tmp_path / "runs/x/summary.json").read_text())
    assert [summary[f"seconds_{kind}"] for kind in ("sft", "reward", "ppo")] == [10.0, 20.0, 10.0]
    calls.clear()
    all_steps.main([*argv[:2], "--overwrite"])  # from the beginning
    assert len(calls) == 4 and json.loads((tmp_path / "runs/x/seconds.json").read_text())["step2_reward"] == 10.0


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"[1]", None])
@pytest.mark.parametrize(
    ("name", "words"),
    [("seconds.json", "seconds.json"), ("step1_sft/summary.json", "metrics could not be read: .*summary.json")],
)
def test_damaged_files_of_the_run_are_named(steps, tmp_path, name, words, content):
    all_steps.main(["--config", "run.yaml"])
    for left in ("step3_ppo/summary.json", name):
        (tmp_path / "runs/x" / left).unlink()
    path = tmp_path / "runs/x" / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ThreestepError, match=f"{words}.* (expects|is not UTF-8 text|holds)"):
        all_steps.main(["--config", "run.yaml", "--resume"])


@pytest.mark.parametrize(
    ("words", "value", "resumes"),
    [
        (["--resume"], None, True), (["--resume", "true"], None, True), (["--resume=true"], False, True),
        ([], True, True), ([], False, False), ([], None, False), (["--resume", "false"], True, False),
    ],
)  # fmt: skip
def test_a_run_is_resumed_in_every_form(steps, tmp_path, words, value, resumes):
    calls, _ = steps
    all_steps.main(["--config", "run.yaml"])
    calls.clear()
    write_run(tmp_path, VALUES | {"resume": value})
    all_steps.main(["--config", "run.yaml", "--overwrite", *words])
    assert len(calls) == (0 if resumes else 4)  # every step had finished


TO_DPO = {name: value for name, value in VALUES.items() if name not in ("step2_reward", "step3_ppo")} | {
    "step2_dpo": {"max_seq_len": 96}
}


def test_dpo_is_the_last_step_of_a_file_that_has_its_section(steps, tmp_path, capsys):
    calls, _ = steps
    write_run(tmp_path, TO_DPO)
    all_steps.main(["--config", "run.yaml"])
    programs = ["threestep.plugins.programs.new_model", "training.step1_sft.main", "training.step2_dpo.main"]
    assert [call[0] for call in calls] == programs
    settings = all_steps.read_plan(TO_DPO, "f").settings
    assert list(settings) == ["step1_sft", "step2_dpo"]
    assert settings["step2_dpo"]["model_name_or_path"] == "runs/x/step1_sft/model"
    assert settings["step2_dpo"]["max_seq_len"] == 96
    summary = json.loads((tmp_path / "runs/x/summary.json").read_text())
    assert {name: value for name, value in summary.items() if not name.startswith("seconds_")} == {
        "sft_eval_loss_before": 6.5, "sft_eval_loss_after": 1.25, "dpo_pair_accuracy": 0.75, "dpo_reward_margin": 0.5,
    }  # fmt: skip
    assert {name for name in summary if name.startswith("seconds_")} == {"seconds_sft", "seconds_dpo"}
    printed = capsys.readouterr().out
    assert "== step 2 of 2, direct preference optimization" in printed
    assert "| step 2: accuracy of the implicit reward " in printed and "0.7500" in printed
    assert "checker" not in printed  # a figure that is not there has no row


@pytest.mark.parametrize("name", ["training/configs/quickstart.yaml", "examples/shapes.yaml"])
def test_the_settings_of_the_examples_are_known_and_used(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # where a dataset module's path starts
    plan = all_steps.read_plan(read_yaml(ROOT / name), name, str(tmp_path))
    all_steps.check_settings(all_steps.write_settings(plan))
    assert "ignored" not in capsys.readouterr().out
    new = parse_arguments(GROUPS, [word for flag in plan.new_model.items() for word in words_of(*flag)], "")
    assert len(plan.settings) == 3 and new[1].out == str(tmp_path / "new_model")


def test_a_file_in_the_place_of_the_settings_is_refused(tmp_path):
    (tmp_path / "configs").write_text("theirs")
    with pytest.raises(ThreestepError, match="^output_dir '.*/configs/.*yaml' cannot be written: .*a file is in the"):
        all_steps.write_settings(all_steps.read_plan(VALUES, "run.yaml", str(tmp_path)))
    assert (tmp_path / "configs").read_text() == "theirs"


def test_the_steps_files_are_without_credentials_and_are_compared_so(tmp_path, monkeypatch):
    monkeypatch.setattr(all_steps.os, "environ", {})
    address = "jsonl:https://me:a-password@host/rows.jsonl?sig={}"
    values = {**VALUES, "shared": {"data_path": [address.format("0123456789abcdef")]}}
    plan = all_steps.read_plan(values, "run.yaml", str(tmp_path))
    for path in all_steps.write_settings(plan).values():
        assert read_yaml(path)["data_path"] == [address.format("***").replace("me:a-password", "***")]
    for step in plan.settings:
        (tmp_path / step).mkdir()
        (tmp_path / step / "summary.json").write_text("{}")
    again = {**VALUES, "shared": {"data_path": [address.format("fedcba9876543210")]}}
    assert all_steps.finished_steps(all_steps.read_plan(again, "run.yaml", str(tmp_path))) == tuple(plan.settings)


def test_a_dry_run_prints_commands_and_folders_and_writes_nothing(without_steps, capsys):
    without_steps({"new_model": {"vocab_size": 512}, "step3_ppo": {"max_answer_seq_len": 16}}, "--num_ranks", "2")
    printed = capsys.readouterr().out
    assert printed.startswith("dry run: nothing is trained or written; this would run on 2 ranks\n")
    made = "--data_path=csv:pairs.csv --vocab_size=512 --out=out/new_model\n"
    assert f"python -m threestep.plugins.programs.new_model {made}" in printed
    assert "== step 3 of 3, PPO\npython -m training.step3_ppo.main --data_path=csv:pairs.csv" in printed
    assert "--actor_model_name_or_path=out/step1_sft/model" in printed and "--max_answer_seq_len=16" in printed
    assert "reads out/new_model; writes out/step1_sft (new)\n" in printed
    assert "reads out/step1_sft/model, out/step2_reward/model; writes out/step3_ppo (new)\n" in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_name_or_path": "./modle"},
            "^step1_sft: the model folder './modle' does not exist; did you mean 'model'",
        ),
        (
            {"shared": {"data_path": "csv:prompts.csv"}},
            "(?s)2 mistakes.*step1_sft: prompts.csv.*step2_reward: prompts.csv: .*step 2 needs responses",
        ),
        ({"shared": {"data_path": "csv:no.csv"}}, "(?s)'no.csv' does not exist"),
        ({"step1_sft": {"max_seq_len": 3, "sed": 4}}, "^step1_sft: step1_sft.yaml: unknown setting 'sed'; did you"),
    ],
)
def test_a_dry_run_finds_what_needs_no_earlier_step(change, message, tmp_path, without_steps):
    (tmp_path / "prompts.csv").write_text("prompt\na\nb\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ThreestepError, match=message):
        without_steps({"new_model": None, "model_name_or_path": "model", **change})


def test_a_dry_run_names_steps_that_are_finished_or_would_be_replaced(tmp_path, without_steps, capsys):
    (tmp_path / "out" / "step1_sft").mkdir(parents=True)
    (tmp_path / "out" / "step1_sft" / "summary.json").write_text("{}")
    with pytest.raises(ThreestepError, match="step1_sft: .*holds a finished run"):
        without_steps({})
    without_steps({}, "--overwrite")
    assert "writes out/step1_sft (holds a run that would be replaced)\n" in capsys.readouterr().out


ALL = "python -m threestep.plugins.programs.all_steps"


@pytest.mark.parametrize(
    ("variables", "words", "command"),
    [
        ({}, ["--config", "a b"], f"{ALL} --config 'a b' --resume"),
        ({COMMAND_VARIABLE: "threestep all"}, ["--config", "a", "--resume"], "threestep all --config a --resume"),
        ({}, ["--resume", "true", "--config", "a"], f"{ALL} --resume --config a"),
        ({}, ["--config", "a", "--resume=false"], f"{ALL} --config a --resume"),
        ({}, ["--config", "true", "--resume", "False"], f"{ALL} --config true --resume"),
        ({COMMAND_VARIABLE: "bash a.sh", OWN_WORDS_VARIABLE: "2"}, ["--work_dir", "/x"], "bash a.sh --resume"),
    ],
)
def test_a_whole_run_is_resumed_without_the_words_that_nobody_typed(monkeypatch, variables, words, command):
    for name in (COMMAND_VARIABLE, OWN_WORDS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert all_steps.resuming_whole_run("threestep.plugins.programs.all_steps", words) == command


def test_the_file_is_looked_for_here_and_in_the_work_dir(steps, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    all_steps.main(["--config", "run.yaml", "--work_dir", str(tmp_path), "--output_dir", "runs/y"])
    assert (tmp_path / "runs/y/summary.json").exists()
