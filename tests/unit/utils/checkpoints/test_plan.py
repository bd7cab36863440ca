"""Which settings a resumed run may have otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.mistakes import mistakes_of
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.plan import CheckpointPlan, check_settings, conversion, describe_placement, placement
from training.utils.flags.arguments import parse_arguments, words_of

MAY_CHANGE = ("save_every", "num_train_epochs")
SFT = {
    "ranks": 2, "zero_stage": 2, "offload": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
    "learning_rate": 0.5, "data": "rows",
}  # fmt: skip
PPO = {
    "ranks": 2, "actor_zero_stage": 0, "critic_zero_stage": 3, "offload": True, "per_device_generation_batch_size": 4,
    "generation_batches": 1, "per_device_training_batch_size": 2, "gradient_accumulation_steps": 1,
}  # fmt: skip


def check(saved: dict, mine: dict, defaults: dict | None = None) -> None:
    check_settings(Path("c"), {"settings": saved, "defaults": {}}, mine, defaults or {}, may_change=MAY_CHANGE)


def told(saved: dict, **changes: object) -> str:
    with pytest.raises(ThreestepError) as mistake:
        check(saved, {**saved, **changes})
    return str(mistake.value)


def test_ranks_and_stages_may_change_where_a_step_takes_as_much():
    check(SFT, {**SFT, "ranks": 1, "zero_stage": 3, "gradient_accumulation_steps": 2})
    check(SFT, {**SFT, "ranks": 4, "per_device_train_batch_size": 1, "offload": True})
    four = {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 1}
    check(PPO, {**PPO, "ranks": 4, "critic_zero_stage": 0, **four})
    assert told(SFT, ranks=1, learning_rate=0.25) == (
        "--resume: c was written with other settings: --learning_rate was 0.5 and is now 0.25; the sequences per "
        "optimizer step (--per_device_train_batch_size x --gradient_accumulation_steps x ranks) were 4 on 2 ranks and "
        "are now 2 on 1 rank; restore them, or start over in another --output_dir"
    )
    both = told(PPO, ranks=1)
    assert "the prompts per rollout (--per_device_generation_batch_size x --generation_batches x ranks) were 8" in both
    assert "the sequences per minibatch (--per_device_training_batch_size x --gradient_accumulation_steps" in both


def test_ranks_that_share_rows_take_one_share_of_a_step_and_draw_as_many_rollouts(monkeypatch):
    """4 ranks in groups of 2 take 2 x 2 sequences, as 2 ranks do; a rollout and its minibatches are dealt to ranks."""
    monkeypatch.setattr("training.utils.checkpoints.plan.SHARING_ROWS", ("ranks_of_a_row",))
    may_change = (*MAY_CHANGE, "ranks_of_a_row")

    def resumed(saved: dict, **changes: object) -> None:
        saved = {**saved, "ranks_of_a_row": 1}
        check_settings(Path("c"), {"settings": saved, "defaults": {}}, {**saved, **changes}, {}, may_change=may_change)

    resumed(SFT, ranks=4, ranks_of_a_row=2)
    with pytest.raises(
        ThreestepError, match="sequences per optimizer step .* were 4 on 2 ranks and are now 2 on 2 ranks"
    ):
        resumed(SFT, ranks_of_a_row=2)
    resumed(PPO, ranks_of_a_row=2)
    with pytest.raises(ThreestepError, match="prompts per rollout .* were 8 on 2 ranks and are now 16 on 4 ranks"):
        resumed(PPO, ranks=4, ranks_of_a_row=2)


def test_where_a_run_keeps_its_models():
    assert placement(SFT) == {"offload": False, "ranks": 2, "zero_stage": 2}
    assert describe_placement(SFT) == "2 ranks, --zero_stage 2"
    assert (
        describe_placement({**PPO, "ranks": 1}) == "1 rank, --actor_zero_stage 0, --critic_zero_stage 3, --offload True"
    )


@pytest.mark.needs_plugin("other_ranks")
def test_other_ranks_need_a_plugin(monkeypatch):
    assert callable(conversion(Path("c"), SFT, {**SFT, "ranks": 1}))
    monkeypatch.setattr("training.utils.checkpoints.plan.added", lambda table, known: {})
    with pytest.raises(ThreestepError, match="c was written on 2 ranks, --zero_stage 2, but this run is on 1 rank, "):
        conversion(Path("c"), SFT, {**SFT, "ranks": 1})


@pytest.mark.parametrize(
    ("name", "begun", "left_open", "other"),
    [
        ("prompt_style", "human_assistant", "auto", "chat_template"),
        ("head_chunk_mb", 512, 0, 256),
        ("num_train_epochs", 1.0, 2.0, None),  # may change
        ("data", "rows", "rows", "others"),
        ("the content of --critic_model_name_or_path", "a", "a", "b"),
    ],
)
def test_what_is_left_open_or_may_change_stays_and_nothing_else(name, begun, left_open, other):
    saved = {**SFT, name: begun}
    check(saved, {**saved, name: left_open})
    shown = {"data": "the data's fingerprint"}.get(name, name if " " in name else f"--{name}")
    if other is None:
        with pytest.raises(ThreestepError, match=f"{shown} was {begun} and is now {left_open}"):
            check_settings(Path("c"), {"settings": saved, "defaults": {}}, {**saved, name: left_open}, {})
    else:
        assert f"{shown} was {begun} and is now {other}" in told(saved, **{name: other})


def test_what_the_flags_left_open_is_written_as_decided():
    plan = CheckpointPlan(CheckpointArguments(), CheckpointFolder("c"), {**SFT, "program": "p"}, None)
    decided = plan.decided({"prompt_style": "chat_template"})
    assert decided.settings == {**SFT, "program": "p", "prompt_style": "chat_template"}
    assert "prompt_style" in decided.flags_in_use and not {"program", "ranks"} & decided.flags_in_use.keys()
    assert plan.began_with("prompt_style") is None


def test_what_the_program_chose_is_no_setting_of_the_users():
    chosen = {"reuse_forwards": True, "reuse_values": True, "data_split": "2,4,4", "prompt_style": "as_stored"}
    begun = {**SFT, **chosen}
    other = {**begun, "reuse_forwards": False, "reuse_values": False}
    for chosen, refused in (([], True), (["reuse_values"], True), (["reuse_values", "reuse_forwards"], False)):
        manifest = {"settings": begun, "defaults": {}, "chosen": chosen}
        with pytest.raises(ThreestepError) if refused else nullcontext() as mistake:
            check_settings(Path("c"), manifest, other, {})
        assert not refused or "--reuse_forwards was True and is now False" in str(mistake.value)
    for name in ("data_split", "prompt_style"):  # which decide the rows
        manifest = {"settings": begun, "defaults": {}, "chosen": [*begun]}
        with pytest.raises(ThreestepError, match=f"--{name} was"):
            check_settings(Path("c"), manifest, {**begun, name: "other"}, {})


def test_a_choice_that_is_made_again_may_differ():
    given = {"reuse_forwards": None, "reuse_values": False, "data_split": "auto", "head_chunk_mb": 0, "seed": 1}
    plan = CheckpointPlan(CheckpointArguments(), CheckpointFolder("c"), given, None, may_change=("seed",), given=given)
    assert plan.chosen == [] and plan.may_differ == {"seed"}
    plan = plan.decided({"reuse_forwards": False, "data_split": "1,0,0"}).decided({"head_chunk_mb": 64})
    assert set(plan.chosen) == {"reuse_forwards", "data_split", "head_chunk_mb"}
    assert plan.may_differ == {"seed", "reuse_forwards", "head_chunk_mb"}


def test_a_setting_that_the_run_began_without_is_compared_with_its_default():
    """The version that wrote the checkpoint had no such flag, and did as its default does."""
    defaults = {"new": 3, "new_list": [], "save_every": 0, "prompt_style": "auto", "learning_rate": 0.1}
    mine = {**SFT, "new": 3, "new_list": [], "save_every": 7, "prompt_style": "chat_template", "content": "a"}
    check(SFT, mine, defaults)
    expected = (
        r"--new did not exist yet .equivalent to 3. and is now 4; --new_list did not exist yet .equivalent to \[\]. "
        "and is now .'a'.; "
    )
    with pytest.raises(ThreestepError, match=expected):
        check(SFT, {**mine, "new": 4, "new_list": ["a"]}, defaults)


def test_a_setting_that_this_version_lacks_is_compared_with_its_default():
    saved, defaults = {**SFT, "old": 3, "save_every": 7}, {"old": 3, "save_every": 0, "learning_rate": 0.1}
    manifest: dict = {"format": 2, "defaults": defaults}
    check_settings(Path("c"), {"settings": saved, **manifest}, SFT, {}, may_change=MAY_CHANGE)
    with pytest.raises(
        ThreestepError, match="other settings: --old was 4, but this version has no such setting; restore"
    ):
        check_settings(Path("c"), {"settings": {**saved, "old": 4}, **manifest}, SFT, {}, may_change=MAY_CHANGE)


@pytest.mark.parametrize(
    ("value", "resume"),
    [("true", "latest"), ("True", "latest"), ("yes", "latest"), ("latest", "latest"), ("false", None), ("no", None),
     ("", None), ("null", None), ("a/step_000001", "a/step_000001")],
)  # fmt: skip
def test_resume_in_every_form(value, resume, tmp_path):
    """As YAML and Python write a bare flag, and as other tools' habits write it on a command line."""
    (tmp_path / "run.yaml").write_text(f"resume: {value}\n")
    (flags,) = parse_arguments([CheckpointArguments], ["--config", str(tmp_path / "run.yaml")], "")
    assert flags.resume == resume
    (bare,) = parse_arguments([CheckpointArguments], ["--resume", "--save_every", "5"], "")
    assert (bare.resume, bare.save_every, CheckpointArguments().resume) == ("latest", 5, None)
    if value not in ("", "null"):
        for words in (["--resume", value], [f"--resume={value}"], words_of("resume", value)):
            (flags,) = parse_arguments([CheckpointArguments], words, "")
            assert flags.resume == resume, words
    if value in ("true", "false"):
        (flags,) = parse_arguments([CheckpointArguments], words_of("resume", value == "true"), "")
        assert flags.resume == resume


def test_mistakes_are_told():
    assert mistakes_of(CheckpointArguments(save_every=-1, keep_last=-2)) == [
        "--save_every expects 0 or more, got -1",
        "--keep_last expects 0 or more, got -2",
    ]
