"""YAML and flags into dataclasses, strictly."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.flags.arguments import ProgramParser, parse_arguments, read_yaml, resolved_settings
from training.utils.flags.flags import flag

# Each level has ten of the level before: of a list 10^12 values, of merged mappings as much work.
ALIASES = b"\n".join(b"a%d: &a%d {<<: [%s]}" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 13))


@dataclass
class Run:
    """One group."""

    output_dir: str = field(default="runs/last", metadata={"help": "Where."})
    seed: int = field(default=1234, metadata={"help": "Seed."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Rate."})
    limit: int | None = field(default=None, metadata={"help": "Bound."})
    steps: list[int] = field(default_factory=list, metadata={"help": "Some."})

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(self.seed >= 0, f"--seed expects 0 or more, got {self.seed}")


@dataclass
class Data:
    """Another."""

    data_path: list[str] = field(default_factory=lambda: ["embedded"], metadata={"help": "Names."})
    offload: bool = field(default=False, metadata={"help": "Off by default."})
    whiten: bool = field(default=True, metadata={"help": "On by default."})

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(bool(self.data_path), "--data_path is empty")
        mistakes.require("bad" not in self.data_path, "--data_path holds 'bad'")


@pytest.fixture
def parse(tmp_path):
    def run(*argv: str, config: str | None = None):
        if config is not None:
            (tmp_path / "run.yaml").write_text(config)
            argv = ("--config", str(tmp_path / "run.yaml"), *argv)
        return parse_arguments((Run, Data), list(argv), "A program.")

    return run


def test_defaults(parse):
    run, data = parse()
    assert run == Run() and data == Data()


def test_a_file_sets_and_flags_override(parse):
    run, data = parse("--seed", "5", "--data_path", "c", config="seed: 3\noutput_dir: out\ndata_path: [a, b]\n")
    assert (run.seed, run.output_dir, data.data_path) == (5, "out", ["c"])


def test_flags_override_wherever_they_stand(parse, tmp_path):
    (tmp_path / "x.yaml").write_text("seed: 3\nlimit: 9\n")
    run, _ = parse_arguments((Run, Data), ["--seed=5", f"--config={tmp_path}/x.yaml"], "")
    assert (run.seed, run.limit) == (5, 9)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # YAML 1.1 reads 1e-5 as a string
        ("learning_rate: 0.5", "learning_rate", 0.5),
        ("seed: -0", "seed", 0),
        ("limit: null", "limit", None),
        ("limit:", "limit", None),
        ("seed:", "seed", 1234),  # no value keeps the default
        ("limit: 7", "limit", 7),
        ("offload: true", "offload", True),
        ("offload: yes", "offload", True),
        ("offload: false", "offload", False),
        ("whiten: false", "whiten", False),
        ("whiten: true", "whiten", True),
        ("data_path: [a, b]", "data_path", ["a", "b"]),
        ("data_path:\n- a\n- 'b c'\n", "data_path", ["a", "b c"]),
        ("data_path: a", "data_path", ["a"]),
        ("data_path: []", "data_path", ["embedded"]),
        ("output_dir: 'a b=c'", "output_dir", "a b=c"),
        ("output_dir: --strange", "output_dir", "--strange"),
        ("output_dir: 12", "output_dir", "12"),
        ("", "seed", 1234),
        ("# nothing\n", "seed", 1234),
    ],
)
def test_values_of_yaml(parse, config, name, value):
    assert resolved_settings(parse(config=config))[name] == value


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--offload"], "offload", True),
        (["--offload", "false"], "offload", False),
        (["--whiten", "False"], "whiten", False),
        (["--no_whiten"], "whiten", False),
        (["--data_path", "a", "b"], "data_path", ["a", "b"]),
        (["--data_path", "a,b"], "data_path", ["a,b"]),
        (["--steps", "1,10", "100", "--seed", "3"], "steps", [1, 10, 100]),
        (["--steps=1,10"], "steps", [1, 10]),
        (["--local_rank", "3"], "seed", 1234),  # DeepSpeed's launcher may pass it
    ],
)
def test_values_of_flags(parse, flags, name, value):
    assert resolved_settings(parse(*flags))[name] == value


def test_every_resolved_value_reads_back(parse, tmp_path):
    parsed = parse("--data_path", "a", "b", "--offload", "--no_whiten", "--learning_rate", "3e-7", "--limit", "2")
    text = yaml.safe_dump(resolved_settings(parsed))
    assert parse(config=text) == parsed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("sed: 3", "run.yaml: unknown setting 'sed'; did you mean 'seed'"),
        ("local_rank: 1", "unknown setting 'local_rank'"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("7: x", "unknown setting '7'"),
        ("seed: {a: 1}", "'seed' expects one value or a list, got a mapping"),
        ("seed: [1, 2]", "unrecognized|belong to no flag: 2"),
        ("seed: three", "^--seed expects a whole number, got 'three'$"),
        ("seed: 1.5", "^--seed expects a whole number, got '1.5'$"),
        ("learning_rate: fast", "^--learning_rate expects a number, got 'fast'$"),
        ("offload: perhaps", "^--offload expects true or false, got perhaps$"),
        ("- seed\n- 3", "expected 'name: value' lines, got a list"),
        ("seed: [1", "run.yaml is not valid YAML"),
        ("seed: 1\nsed: 2\nouput_dir: x", "2 mistakes in the configuration:(.|\n)*'sed'(.|\n)*'ouput_dir'"),
    ],
)
def test_mistakes_in_a_file(parse, config, message):
    with pytest.raises(ThreestepError, match=message):
        parse(config=config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sed", "3"], "unknown flag --sed; did you mean 'seed'"),
        (["--see=3"], "unknown flag --see"),  # no abbreviations
        (["--sed", "3", "--ofload"], "2 mistakes(.|\n)*--sed(.|\n)*--ofload; did you mean 'offload'"),
        (["word"], "the command line has words that belong to no flag: word"),
        (["--seed", "x"], "^--seed expects a whole number, got 'x'$"),
        (["--seed"], "^--seed expects a value, got nothing; write it behind the flag$"),
        (["--data_path", "--seed", "3"], "^--data_path expects a value, got nothing"),
        (["--seed=--"], "in the command line or the configuration: '--seed=--': '--' is not a value; leave it out"),
        (["--data_path", "a", "--", "b"], "'--': '--' is not a value"),
        (["--config"], "--config expects a file's path after it"),
        (["--config", "nowhere.yaml"], "cannot read the configuration nowhere.yaml: No such file"),
    ],
)
def test_mistakes_in_flags(parse, flags, message):
    with pytest.raises(ThreestepError, match=message):
        parse(*flags)


def test_a_stray_word_never_joins_a_list_of_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("data_path: [a, b]")
    with pytest.raises(ThreestepError, match="belong to no flag: stray"):
        parse_arguments((Run, Data), ["stray", "--config", str(tmp_path / "run.yaml")], "")


def test_all_mistakes_of_all_groups_at_once(parse):
    with pytest.raises(ThreestepError) as caught:
        parse("--seed", "-3", "--data_path", "bad")
    assert str(caught.value) == (
        "2 mistakes in the configuration:\n  - --seed expects 0 or more, got -3\n  - --data_path holds 'bad'"
    )


def test_help_ends_well_and_tells_defaults(parse, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "--learning_rate" in said and "[1e-05]" in said and "--local_rank" not in said


def test_help_names_the_command_that_was_typed(parse, capsys, monkeypatch):
    """A package that is run is called `__main__` there, and every step's program `main.py`."""
    spec = importlib.machinery.ModuleSpec("threestep.plugins.inspect.__main__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    with pytest.raises(SystemExit):
        parse("--help")
    assert capsys.readouterr().out.startswith("usage: python -m threestep.plugins.inspect [flags]\n")


@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step2_dpo", "step3_ppo"])
def test_help_and_mistakes_import_no_library(step):
    """They are answered at once: each of these takes half a second and more, and for --help a tenth is too much."""
    nowhere = "['--model_name_or_path', '/nowhere', '--data_path', 'embedded']"
    if step == "step3_ppo":
        nowhere = nowhere.replace("--model", "--actor_model").replace(
            "]", ", '--critic_model_name_or_path', '/nowhere']"
        )
    program = (
        f"import sys; from training.{step} import main; from training.utils.base.errors import ThreestepError\n"
        "def loaded(*names): return [name for name in names if name in sys.modules]\n"
        "quick = []\n"
        f"for argv in (['--help'], ['--sed', '3'], ['--data_split', 'x'], {nowhere}):\n"
        "    try: main.main(argv)\n"
        "    except (SystemExit, ThreestepError): pass\n"
        "    else: raise AssertionError(argv)\n"
        "    quick = quick or [loaded('tqdm', 'yaml', 'numpy', 'psutil', 'asyncio')]\n"
        "print(quick[0], loaded('torch', 'transformers', 'datasets', 'deepspeed'))"
    )
    got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert got.stdout.splitlines()[-1] == "[] []"


def test_a_folder_is_no_configuration(tmp_path):
    with pytest.raises(ThreestepError, match="cannot read the configuration"):
        read_yaml(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: \xff", "cannot read the configuration .*run.yaml: expected UTF-8 text: "),
        (b"output_dir: 2001-99-99", "run.yaml is not valid YAML: month must be in 1..12"),
        (b"seed: " + b"9" * 5000, "run.yaml is not valid YAML: .*digits"),
        (b"data_path: " + b"[" * 100_000, "run.yaml is not valid YAML: .*on too many levels"),
        (b"a0: &a0 {x: 1}\n" + ALIASES, "run.yaml: expected at most 100,000 values, got more, its aliases"),
        (b"a0: &a0 [1]\n" + ALIASES.replace(b"<<: ", b"y: "), "run.yaml: expected at most 100,000 values, got more"),
        (b"a: &a [*a]", "run.yaml: expected at most .* one that stands for itself"),
        (
            b"seed: 1\n" + b"#" * (4 << 20),
            "^[^:]*run.yaml: expected a .* of at most 4 MiB, got 4,194,312 bytes",
        ),
        (b"help: x", r"unknown setting 'help'$"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ThreestepError, match=message):
        parse_arguments((Run, Data), ["--config", str(tmp_path / "run.yaml")], "")


def test_a_path_that_no_system_takes(capsys):
    with pytest.raises(ThreestepError, match="cannot read the configuration a\0b"):
        read_yaml("a\0b")
    with pytest.raises(ThreestepError):
        parse_arguments((Run, Data), ["--config"], "")
    assert capsys.readouterr().err == ""  # one sentence, and no usage before it


def test_two_groups_that_share_a_name():
    @dataclass
    class Other:
        seed: int = 1

    with pytest.raises(AssertionError, match="two argument groups share the name seed"):
        resolved_settings((Run(), Other()))


@pytest.mark.parametrize(
    ("words", "on", "rest"),
    [
        (["--live", "a"], True, ["a"]),
        (["--live", "true", "a"], True, ["a"]),
        (["a", "--live=True"], True, ["a"]),
        (["--live", "false", "a"], False, ["a"]),
        (["--live", "--live=false", "a", "true"], False, ["a", "true"]),
        (["a"], None, ["a"]),
    ],
)
def test_a_switch_may_have_its_value_behind_it(words, on, rest):
    parser = ProgramParser("training.a", "a program")
    parser.add_argument("--live", action="store_true", default=None)
    parser.add_argument("runs", nargs="*")
    options = parser.parse(words)
    assert (options.live, options.runs) == (on, rest)


@dataclass
class LeftOpen:
    quick: bool | None = flag(None, "On.", takes_auto=True)
    rows: int | None = flag(4, "Rows.", "rows >= 0", takes_auto=True)


@pytest.mark.parametrize(
    ("words", "quick", "rows"),
    [
        ([], None, 4),
        (["--quick", "--rows", "auto"], True, None),
        (["--quick", "false", "--rows=0"], False, 0),
        (["--quick", "auto"], None, 4),
    ],
)
def test_auto_leaves_a_flag_to_the_program(words, quick, rows, tmp_path):
    assert parse_arguments([LeftOpen], words, "") == (LeftOpen(quick, rows),)
    settings = tmp_path / "run.yaml"
    settings.write_text("quick: auto\nrows: auto\n")
    assert parse_arguments([LeftOpen], ["--config", str(settings)], "") == (LeftOpen(None, None),)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--quick", "perhaps"], "--quick expects true or false, or auto, got perhaps"),
        (["--rows", "many"], "--rows expects a whole number, or auto, got 'many'"),
        (["--rows", "-1"], "--rows expects 0 or more, got -1"),
    ],
)
def test_neither_a_value_nor_auto(words, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        parse_arguments([LeftOpen], words, "")


@pytest.mark.parametrize(
    ("words", "seed"),
    [([], 7), (["--resume"], 1234), (["--resume", "false"], 7), (["--resume", "--seed", "9"], 9)],
)
def test_a_resumed_run_leaves_what_was_chosen_to_the_program_again(tmp_path, words, seed):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 7  # auto\noutput_dir: x\n")
    run, _ = parse_arguments((Run, CheckpointArguments), ["--config", str(path), *words], "")
    assert (run.seed, run.output_dir) == (seed, "x")


def test_a_resumed_run_sets_settings_of_another_version_aside(tmp_path, capsys):
    """Its config.yaml may be of a version with more flags; what the checkpoint was written with is compared later."""
    path = tmp_path / "config.yaml"
    path.write_text("output_dir: x\nflag_of_before: 7\n")
    run, _ = parse_arguments((Run, CheckpointArguments), ["--config", str(path), "--resume"], "")
    assert run.output_dir == "x"
    assert capsys.readouterr().out == f"{path}: set aside, as this version has no such settings: flag_of_before\n"
    for words in ([], ["--resume", "false"]):
        with pytest.raises(ThreestepError, match="unknown setting 'flag_of_before'"):
            parse_arguments((Run, CheckpointArguments), ["--config", str(path), *words], "")
    with pytest.raises(ThreestepError, match="unknown flag --flag_of_before"):
        parse_arguments((Run, CheckpointArguments), ["--resume", "--flag_of_before", "7"], "")


@dataclass
class Beside:
    """Flags that only make sense beside another group's."""

    ranks: int | None = None

    def validate_beside(self, settings: Mapping[str, Any], mistakes: Mistakes) -> None:
        mistakes.require(self.ranks is None or settings["seed"] == 9, "--ranks expects --seed 9")


def test_a_group_sees_the_settings_of_all_groups():
    assert parse_arguments([Beside, Run], ["--ranks", "2", "--seed", "9"], "")[0] == Beside(2)
    with pytest.raises(ThreestepError, match="--ranks expects --seed 9"):
        parse_arguments([Beside, Run], ["--ranks", "2"], "")
