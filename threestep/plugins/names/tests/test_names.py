"""How names of other programs are read, entry by entry, and what is suggested for a name that is none."""

from __future__ import annotations

import re

import pytest

from threestep.plugins.names.meant_flags import MEANT
from threestep.plugins.names.other_names import Needless, Refused, Renamed, Same, translated
from threestep.plugins.names.removed_flags import REMOVED_FLAGS
from training.step1_sft import STEP
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import defaults_of, parse_arguments
from training.utils.flags.flags import nearest_flags
from training.utils.flags.step import known_steps
from training.utils.plugins.registry import missing
from training.utils.run.launch import as_variables

TABLE = {
    "--gone": Needless("it is in the log", takes_value=False),
    "--one": Needless("there is one"),
    "--old": Renamed("--new", "an older spelling"),
    "--refused": Refused("was replaced by --other"),
    "--on": Renamed("--new", takes_value=False, words=lambda value, given: ["--new", "1"]),
    "--both": Renamed("--new", takes_value=False, reads_false=True, words=lambda value, given: ["--new", value]),
    "--never": Refused("is not built", takes_value=False),
    "--names": Renamed("--new", takes_list=True, words=lambda value, given: ["--new", ",".join(value.split())]),
    "--total": Renamed(
        "--new N --length inf", words=lambda value, given: ["--new", value, "--length", "inf"], overrides=("--length",)
    ),
    "--ours": Same(spelled=lambda words: [word.upper() for word in words]),
    "--other": Renamed("--new"),
}


def test_words_between_stay_in_their_order_and_mistakes_are_told_at_once():
    words, lines = translated("--data_path a b --old=3 --gone --seed 1 --old 4 --one 1".split(), TABLE)
    assert words == "--data_path a b --new 3 --seed 1 --new 4".split()
    assert lines == [
        "--old is read as --new 3: an older spelling",
        "--gone is not needed: it is in the log",
        "--old is read as --new 4: an older spelling",
        "--one is not needed: there is one",
    ]
    with pytest.raises(ThreestepError) as told:
        translated("--refused 3 --old --gone".split(), TABLE)
    assert [line.strip() for line in str(told.value).splitlines()[1:]] == [
        "- --refused was replaced by --other",
        "- --old needs a value, got none",
    ]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--on --seed 1", "--new 1 --seed 1"),
        ("--on True --seed 1", "--new 1 --seed 1"),
        ("--on=false --seed 1", "--seed 1"),
        ("--on 3", "--new 1 3"),  # which argparse refuses
        ("--both no", "--new no"),
        ("--never false", ""),
        ("--names a b --seed 1", "--new a,b --seed 1"),
        ("--length 3 --total 7 --length 4", "--length 3 --new 7 --length 4 --length inf"),
        ("--ours a b", "--ours A B"),
        ("--ours A", "--ours A"),
        ("--a=--b --other=--c", "--a=--b --new --c"),
    ],
)
def test_switches_lists_and_values(typed, read):
    assert translated(typed.split(), TABLE)[0] == read.split()


def test_two_flags_that_are_read_as_one_agree_or_are_refused():
    assert translated("--new 3 --other 3".split(), TABLE)[0] == "--new 3 --new 3".split()
    with pytest.raises(ThreestepError) as told:
        translated("--new 3 --other 4".split(), TABLE)
    assert str(told.value) == ("--new 3 and --new 4 (as --other is read) contradict each other; leave one of them out")
    with pytest.raises(ThreestepError, match="^--never is not built$"):
        translated(["--never"], TABLE)


OURS = {name for step in known_steps().values() for name in defaults_of(step.groups)}
SFT = list(defaults_of(known_steps()["step1_sft"].groups))
PPO = list(defaults_of(known_steps()["step3_ppo"].groups))


@pytest.mark.parametrize(
    ("typed", "names", "said"),
    [
        ("lr", SFT, "'learning_rate'?"),  # and no `min_lr_ratio`, which has the letters and is not meant
        ("lr", PPO, "'actor_learning_rate'"),
        ("batch-size", PPO, "'per_device_generation_batch_size'"),
        ("learning_rat", SFT, "'learning_rate'"),
        ("output-dir", SFT, "'output_dir'"),
        ("eval_batch_size", SFT, "'per_device_eval_batch_size'"),
        ("samples_per_prompt", PPO, "'num_samples_per_prompt'"),
        ("warmup", SFT, "'warmup_ratio'"),
        ("eps_clip", PPO, "'clip_range'"),
        ("adv_estimator", PPO, "'advantage'"),
        ("loss_agg_mode", PPO, "'loss_aggregation'"),
        ("kl_loss_coef", PPO, "'kl_coef'"),
        ("rollout_n", PPO, "'num_samples_per_prompt'"),
        *((nothing, [*SFT, "local_rank"], "") for nothing in ("qqqq", "num_beams", "compute_metrics", "tokenizer")),
    ],
)
def test_the_right_one_is_suggested_first(typed, names, said):
    found = nearest_flags(typed, names)
    assert found.startswith(f"; did you mean {said}") if said else found == ""


def test_what_people_mean_are_flags_of_some_program():
    of_plugins = missing("flags")  # that are not there
    known = {*SFT, *PPO, *defaults_of(known_steps()["step2_dpo"].groups), *of_plugins, "max_new_tokens"}
    assert all(flag in known for flags in MEANT.values() for flag in flags)
    assert not {name for name in MEANT if name in SFT and name in PPO}


def test_the_launchers_flags():
    flags = "--num_gpus 2 --include localhost:0 --num_nodes 4 --master_port --seed 1".split()
    with pytest.raises(ThreestepError) as told:
        as_variables(flags, {"THREESTEP_RANKS": "1"})
    assert [line.strip() for line in str(told.value).splitlines()[1:]] == [
        "- --num_gpus 2 and THREESTEP_RANKS=1 contradict each other; leave one of them out",
        "- --include chooses hosts and GPUs for `deepspeed`; here, CUDA_VISIBLE_DEVICES=0,1 chooses GPUs and "
        "THREESTEP_HOSTFILE chooses hosts",
        "- --num_nodes must be 1, got 4; to use several hosts, list them in a file named by THREESTEP_HOSTFILE or "
        "--hostfile",
        "- --master_port needs a value, got none",
    ]
    assert as_variables(["--num_gpus", "2"], {"THREESTEP_RANKS": "2"})[1] == {"THREESTEP_RANKS": "2"}
    with pytest.raises(ThreestepError, match="^--num_gpus belongs to the launcher.*; pass it to scripts/step"):
        parse_arguments(STEP.groups, "--model_name_or_path m --num_gpus 1".split(), "", STEP.old_flags)


BEGUN = "init_lr_ratio: 0.0\nnum_cycles: 0.5\nzero3_prefetch_parameters: null\nlogging_steps: 1\nseed: 7\n"


@pytest.mark.parametrize("step", known_steps())
def test_a_run_of_before_resumes_with_its_configuration(step, tmp_path):
    (tmp_path / "config.yaml").write_text(BEGUN)
    """Flags that are gone: their defaults ask for nothing, and other values are refused."""
    its = known_steps()[step]
    assert REMOVED_FLAGS.items() <= its.old_flags.items()
    path = "--actor_model_name_or_path" if step == "step3_ppo" else "--model_name_or_path"
    words = ["--config", str(tmp_path / "config.yaml"), path, "m", "--data_path", "embedded"]
    assert parse_arguments(its.groups, words, "", its.old_flags)[0].seed == 7


def test_another_programs_name_is_suggested_too():
    with pytest.raises(ThreestepError, match="^unknown flag --max_lenght; did you mean '--max_length'"):
        parse_arguments(STEP.groups, ["--max_lenght", "8"], "", STEP.old_flags)
    with pytest.raises(ThreestepError, match="^unknown flag --callbacks; did you mean '--callback'"):
        parse_arguments(STEP.groups, ["--callbacks", "mine"], "", STEP.old_flags)


def test_trls_processes_are_ranks_from_the_words_or_the_file(tmp_path, monkeypatch, capsys):
    assert as_variables(["--num_processes", "4"], {})[1] == {"THREESTEP_RANKS": "4"}
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nnum_processes: 4\ndataset_name: a/b\n")
    for words in (["--config", str(file)], [f"--config={file}"]):
        assert as_variables(words, {})[:2] == (words, {"THREESTEP_RANKS": "4"})
        given = as_variables([*words, "--num_ranks", "2"], {})
        assert given[:2] == (words, {"THREESTEP_RANKS": "2"})  # what is typed counts
    assert as_variables(["--config", str(tmp_path / "none.yaml")], {})[1] == {}
    monkeypatch.setenv("WORLD_SIZE", "4")
    parse_arguments(STEP.groups, ["--config", str(file)], "", STEP.old_flags)
    assert (
        "--num_processes 4 is not needed: the launcher has already started this number of ranks"
        in capsys.readouterr().out
    )
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(
        ThreestepError, match="^--num_processes 4 applies to the launcher, which starts the ranks; pass it"
    ):
        parse_arguments(STEP.groups, ["--config", str(file)], "", STEP.old_flags)


@pytest.mark.parametrize("step", known_steps())
def test_what_is_renamed_not_needed_or_refused_says_so(step):
    """Each entry of each table without words of its own, and no value of a switch that asks for nothing."""
    table = known_steps()[step].old_flags
    for flag, old in table.items():
        is_switch = not old.takes_value and not getattr(old, "takes_list", False)
        typed = [flag, *([] if is_switch else ["a_value_that_nobody_gives"])]
        if isinstance(old, Needless):
            assert translated(typed, table) == ([], [f"{flag} is not needed: {old.why}"])
        elif isinstance(old, Renamed) and old.words is None:
            assert translated(typed, table)[0] == [old.now, *typed[1:]] and old.now.removeprefix("--") in OURS
        elif isinstance(old, Refused):
            with pytest.raises(ThreestepError, match=f"^{re.escape(f'{flag} {old.why}')}$"):
                translated(typed, table)
            assert not is_switch or translated([flag, "false"], table)[0] == []
