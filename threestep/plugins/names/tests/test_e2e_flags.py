"""DeepSpeed-Chat's e2e_rlhf.py, behind all_steps: its flags, and the scripts that it runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.deepspeed_chat_lines import LINES
from threestep.plugins.names import e2e_flags
from threestep.plugins.programs import all_steps
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments, resolved_settings, words_of
from training.utils.flags.step import known_steps

# The kinds of machines and the sizes that it has scripts for.
SCRIPTS = [
    ("single_gpu", "1.3b"),
    ("single_node", "1.3b"),
    ("single_node", "6.7b"),
    ("single_node", "13b"),
    ("multi_node", "66b"),
]
STEPS = {"step1_sft": "sft", "step2_reward": "reward", "step3_ppo": "ppo"}
HOSTS = {"THREESTEP_HOSTFILE": "hosts"}
MODELS = {"step3_ppo": {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}}


@pytest.fixture
def plans(monkeypatch, tmp_path) -> list[Any]:
    """What all_steps would run, from a folder of the test's."""
    monkeypatch.chdir(tmp_path)
    found: list[Any] = []
    monkeypatch.setattr(all_steps, "run_plan", lambda plan, *_, **__: found.append(plan) or {})
    monkeypatch.setattr(all_steps, "summarize", lambda *_: {})
    monkeypatch.setattr(all_steps, "hooks", lambda _: [])
    return found


def settings_of(step: str, words: list[str]) -> dict[str, Any]:
    declared = known_steps()[step]
    roles = [word for name, value in MODELS.get(step, {}).items() for word in (f"--{name}", value)]
    return resolved_settings(parse_arguments(declared.groups, [*words, *roles], "", declared.old_flags))


@pytest.mark.parametrize(("kind", "size"), SCRIPTS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_has_the_settings_of_its_script(kind, size, step, capsys):
    """Those of the script's own command line, which other tests read."""
    name = f"{kind}/run_{'350m' if step == 'step2_reward' else size}"
    (line,) = (line for line in LINES if (line.step, line.name) == (STEPS[step], name))
    its = settings_of(step, ["--data_path", "Dahoas/rm-static", *line.flags.split()])
    values = e2e_flags.settings_of({"deployment_type": kind, "actor_model": size}, HOSTS)
    section = {"model_name_or_path": values["model_name_or_path"], **values["shared"], **values[step]}
    if step == "step3_ppo":
        del section["model_name_or_path"]
    ours = settings_of(step, [word for name, value in section.items() for word in words_of(name, value)])
    assert {name: (ours[name], its[name]) for name in its if ours[name] != its[name]} == {}


def test_its_flags_are_read(plans, capsys):
    words = "--actor-model facebook/opt-1.3b --reward-model 350m --actor-zero-stage 1 --reward-zero-stage 3"
    all_steps.main([*words.split(), "--output-dir", "out", "--deployment-type", "single_node"])
    (plan,) = plans
    assert list(plan.settings) == list(STEPS) and plan.output_dir == Path("out") and plan.ranks is None
    stages = {step: {n: v for n, v in plan.settings[step].items() if "zero_stage" in n} for step in STEPS}
    assert stages == {
        "step1_sft": {"zero_stage": "1"},
        "step2_reward": {"zero_stage": "3"},
        "step3_ppo": {"actor_zero_stage": "1", "critic_zero_stage": "3"},
    }
    assert plan.settings["step1_sft"]["model_name_or_path"] == "facebook/opt-1.3b"
    assert plan.settings["step2_reward"]["model_name_or_path"] == "facebook/opt-350m"


def test_one_gpu_is_one_rank_and_steps_have_numbers(plans, capsys, tmp_path):
    all_steps.main(["--actor-model", "1.3b"])
    assert plans[0].ranks == 1 and plans[0].output_dir == Path("output")
    plans.clear()
    all_steps.main("--step 1 2 --actor-model 1.3b".split())
    assert list(plans[0].settings) == ["step1_sft", "step2_reward"]
    with pytest.raises(
        ThreestepError, match="--step 3 expects output/step1_sft/model, which step 1 writes; run step 1"
    ):
        all_steps.main("--step 3 --actor-model 1.3b".split())
    for step in ("step1_sft", "step2_reward"):
        (tmp_path / "output" / step / "model").mkdir(parents=True)
    all_steps.main("--step 3 --actor-model 1.3b".split())
    assert list(plans[1].settings) == ["step3_ppo"]
    with pytest.raises(ThreestepError, match="^--step must be one or more of 1, 2, 3, got 4; choose from these$"):
        all_steps.main("--step 4 --actor-model 1.3b".split())


def test_a_new_model_is_made_for_step_1_alone(plans, tmp_path, capsys):
    (tmp_path / "output" / "step1_sft" / "model").mkdir(parents=True)
    Path("run.yaml").write_text("output_dir: output\nnew_model: {hidden: 8}\nshared: {data_path: embedded}\n")
    all_steps.main("--config run.yaml --step 2".split())
    all_steps.main("--config run.yaml --step 1".split())
    assert [plan.new_model is None for plan in plans] == [True, False]


def test_what_it_has_no_script_for_and_a_file_beside_its_flags():
    sizes = ("1.3b", "6.7b", "13b", "66b")
    for kind, size in itertools.product(("single_gpu", "single_node", "multi_node"), sizes):
        if (kind, size) in SCRIPTS:
            continue
        with pytest.raises(
            ThreestepError, match=f"^DeepSpeed-Chat has no script for .* {kind} with --actor-model {size}"
        ):
            e2e_flags.settings_of({"deployment_type": kind, "actor_model": size}, HOSTS)
    with pytest.raises(ThreestepError, match="has both --config and e2e_rlhf.py's flags, which replace a"):
        all_steps.main("--config run.yaml --actor-model 1.3b".split())
    with pytest.raises(ThreestepError, match="^--config expects a YAML file with a section for each step"):
        all_steps.main([])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"reward_model": "1.3b"}, "^--reward-model expects 350m, the only size with scripts in DeepSpeed-Chat"),
        ({"actor_zero_stage": "4"}, "^--actor-zero-stage expects 0, 1, 2 or 3, got 4$"),
        (
            {"deployment_type": "multi_node", "actor_model": "66b"},
            "^--deployment-type multi_node needs THREESTEP_HOSTFILE to name a file",
        ),
    ],
)
def test_mistakes(given, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        e2e_flags.settings_of(given, {})
