"""YAML and flags into dataclasses, strictly."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
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
    output_dir: str = field(default="runs/last", metadata={"help": "Where."})
    seed: int = field(default=1234, metadata={"help": "Seed."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Rate."})
    limit: int | None = field(default=None, metadata={"help": "Bound."})
    steps: list[int] = field(default_factory=list, metadata={"help": "Some."})
    quick: bool | None = flag(None, "On.", takes_auto=True)
    rows: int | None = flag(4, "Rows.", "rows >= 0", takes_auto=True)

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(self.seed >= 0, f"--seed expects 0 or more, got {self.seed}")


@dataclass
class Data:
    data_path: list[str] = field(default_factory=lambda: ["embedded"], metadata={"help": "Names."})
    offload: bool = field(default=False, metadata={"help": "Off by default."})
    whiten: bool = field(default=True, metadata={"help": "On by default."})

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require("bad" not in self.data_path, "--data_path holds 'bad'")


@pytest.fixture
def parse(tmp_path):
    """Parse flags, a configuration (the file's content, in place of the first), or both."""

    def run(*argv: str | bytes, groups: Any = (Run, Data)) -> Any:
        words = [word for word in argv if isinstance(word, str)]
        if content := b"".join(word for word in argv if isinstance(word, bytes)):
            (tmp_path / "run.yaml").write_bytes(content)
            words = ["--config", str(tmp_path / "run.yaml"), *words]
        return parse_arguments(groups, words, "A program.")

    return run


def test_defaults_a_file_and_flags_over_it(parse):
    assert parse() == (Run(), Data())
    run, data = parse(b"seed: 3\noutput_dir: out\ndata_path: [a, b]\n", "--seed", "5", "--data_path", "c")
    assert (run.seed, run.output_dir, data.data_path) == (5, "out", ["c"])


def test_flags_override_wherever_they_stand(parse, tmp_path):
    (tmp_path / "x.yaml").write_text("seed: 3\nlimit: 9\n")
    run, _ = parse("--seed=5", f"--config={tmp_path}/x.yaml")
    assert (run.seed, run.limit) == (5, 9)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ([b"learning_rate: 1e-5"], "learning_rate", 1e-5),  # YAML 1.1 reads 1e-5 as a string
        ([b"seed: -0"], "seed", 0),
        ([b"limit: null"], "limit", None),
        ([b"limit:"], "limit", None),
        ([b"seed:"], "seed", 1234),  # no value keeps the default
        ([b"offload: yes"], "offload", True),
        ([b"offload: false"], "offload", False),
        ([b"whiten: false"], "whiten", False),
        ([b"data_path:\n- a\n- 'b c'\n"], "data_path", ["a", "b c"]),
        ([b"data_path: a"], "data_path", ["a"]),
        ([b"data_path: []"], "data_path", ["embedded"]),
        ([b"output_dir: 'a b=c'"], "output_dir", "a b=c"),
        ([b"output_dir: --strange"], "output_dir", "--strange"),
        ([b"output_dir: 12"], "output_dir", "12"),
        ([b"# nothing\n"], "seed", 1234),
        (["--offload"], "offload", True),
        (["--offload", "false"], "offload", False),
        (["--whiten", "False"], "whiten", False),
        (["--no_whiten"], "whiten", False),
        (["--data_path", "a", "b"], "data_path", ["a", "b"]),
        (["--data_path", "a,b"], "data_path", ["a,b"]),
        (["--steps", "1,10", "100", "--seed", "3"], "steps", [1, 10, 100]),
        (["--steps=1,10"], "steps", [1, 10]),
        (["--local_rank", "3"], "seed", 1234),  # DeepSpeed's launcher may pass it
        # auto leaves a flag to the program
        ([b"quick: auto\nrows: auto\n"], "rows", None),
        ([b"quick: auto\n"], "quick", None),
        (["--quick", "--rows", "auto"], "quick", True),
        (["--quick", "--rows", "auto"], "rows", None),
        (["--quick", "false", "--rows=0"], "quick", False),
        (["--quick", "auto"], "quick", None),
    ],
)
def test_values(parse, words, name, value):
    found = resolved_settings(parse(*words))[name]
    assert found == value and type(found) is type(value)


def test_every_resolved_value_reads_back(parse):
    parsed = parse("--data_path", "a", "b", "--offload", "--no_whiten", "--learning_rate", "3e-7", "--limit", "2")
    assert parse(yaml.safe_dump(resolved_settings(parsed)).encode()) == parsed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([b"sed: 3"], "run.yaml: unknown setting 'sed'; did you mean 'seed'"),
        ([b"local_rank: 1"], "unknown setting 'local_rank'"),
        ([b"config: other.yaml"], "unknown setting 'config'"),
        ([b"help: x"], r"unknown setting 'help'$"),
        ([b"7: x"], "unknown setting '7'"),
        ([b"seed: {a: 1}"], "'seed' expects one value or a list, got a mapping"),
        ([b"seed: [1, 2]"], "unrecognized|words that belong to no flag: 2"),
        ([b"seed: three"], "^--seed expects a whole number, got 'three'$"),
        ([b"seed: 1.5"], "^--seed expects a whole number, got '1.5'$"),
        ([b"learning_rate: fast"], "^--learning_rate expects a number, got 'fast'$"),
        ([b"offload: perhaps"], "^--offload expects true or false, got perhaps$"),
        ([b"- seed\n- 3"], "expected 'name: value' lines, got a list"),
        ([b"seed: [1"], "run.yaml is not valid YAML"),
        ([b"seed: 1\nsed: 2\nouput_dir: x"], "2 mistakes in the configuration:(.|\n)*'sed'(.|\n)*'ouput_dir'"),
        ([b"data_path: [a, b]", "stray"], "belong to no flag: stray"),  # it never joins the file's list
        ([b"seed: \xff"], "cannot read the configuration file .*run.yaml as UTF-8: "),
        ([b"output_dir: 2001-99-99"], "run.yaml is not valid YAML: month must be in 1..12"),
        ([b"seed: " + b"9" * 5000], "run.yaml is not valid YAML: .*digits"),
        ([b"data_path: " + b"[" * 100_000], "run.yaml is not valid YAML: .*nested too deeply"),
        ([b"a0: &a0 {x: 1}\n" + ALIASES], "run.yaml: expected at most 100,000 values, got more after expanding"),
        ([b"a0: &a0 [1]\n" + ALIASES.replace(b"<<: ", b"y: ")], "expected at most 100,000 values, got more"),
        ([b"a: &a [*a]"], "run.yaml: expected at most .* an alias that contains itself"),
        ([b"#" * (4 << 20) + b"\nx: 1"], "^[^:]*run.yaml: expected a .* of at most 4 MiB, got 4,194,309 bytes"),
        (["--sed", "3"], "unknown flag --sed; did you mean '--seed'"),
        (["--see=3"], "unknown flag --see"),  # no abbreviations
        (["--sed", "3", "--ofload"], "2 mistakes(.|\n)*--sed(.|\n)*--ofload; did you mean '--offload'"),
        (["word"], "the command line has words that belong to no flag: word"),
        (["--seed", "x"], "^--seed expects a whole number, got 'x'$"),
        (["--seed"], "^--seed expects a value, got nothing; write a value after the flag$"),
        (["--data_path", "--seed", "3"], "^--data_path expects a value, got nothing"),
        (
            ["--seed=--"],
            "on the command line or in the configuration file: '--seed=--': '--' is not a value; leave it out",
        ),
        (["--data_path", "a", "--", "b"], "'--': '--' is not a value"),
        (["--config"], "--config expects a file path after it"),
        (["--config", "nowhere.yaml"], "cannot read the configuration file nowhere.yaml: No such file"),
        (["--config", "/"], "cannot read the configuration"),
        (["--quick", "perhaps"], "--quick expects true or false, or auto, got perhaps"),
        (["--rows", "many"], "--rows expects a whole number, or auto, got 'many'"),
        (["--rows", "-1"], "--rows expects 0 or more, got -1"),
        # those of all groups at once
        (
            ["--seed", "-3", "--data_path", "bad"],
            "^2 mistakes in the configuration:\n  - --seed expects 0 or more, got -3\n  - --data_path holds 'bad'$",
        ),
    ],
    ids=lambda given: str(given[0][:30]) if isinstance(given, list) else "",
)
def test_mistakes(parse, words, message, capsys):
    with pytest.raises(ThreestepError, match=message):
        parse(*words)
    assert capsys.readouterr().err == ""  # one sentence, and no usage before it


def test_a_path_that_no_system_takes():
    with pytest.raises(ThreestepError, match="cannot read the configuration file a\0b"):
        read_yaml("a\0b")


def test_help_tells_defaults_and_the_command_that_was_typed(parse, capsys, monkeypatch):
    """A package that is run is called `__main__` there, and every step's program `main.py`."""
    spec = importlib.machinery.ModuleSpec("threestep.plugins.inspect.__main__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    with pytest.raises(SystemExit) as end:
        parse("--help")
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage: python -m threestep.plugins.inspect [flags]\n")
    assert "--learning_rate" in said and "[1e-05]" in said and "--local_rank" not in said


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


def test_two_groups_that_share_a_name():
    other = make_dataclass("Other", [("seed", int, 1)])()
    with pytest.raises(AssertionError, match="two argument groups share the name seed"):
        resolved_settings((Run(), other))


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


@pytest.mark.parametrize(
    ("words", "seed"),
    [([], 7), (["--resume"], 1234), (["--resume", "false"], 7), (["--resume", "--seed", "9"], 9)],
)
def test_a_resumed_run_leaves_what_was_chosen_to_the_program_again(parse, words, seed):
    run, _ = parse(b"seed: 7  # auto\noutput_dir: x\n", *words, groups=(Run, CheckpointArguments))
    assert (run.seed, run.output_dir) == (seed, "x")


def test_a_resumed_run_sets_settings_of_another_version_aside(parse, tmp_path, capsys):
    """Its config.yaml may be of a version with more flags; what the checkpoint was written with is compared later."""
    config, groups = b"output_dir: x\nflag_of_before: 7\n", (Run, CheckpointArguments)
    assert parse(config, "--resume", groups=groups)[0].output_dir == "x"
    said = f"{tmp_path}/run.yaml: ignored because this version has no such settings: flag_of_before\n"
    assert capsys.readouterr().out == said
    for words in ((config,), (config, "--resume", "false"), ("--resume", "--flag_of_before", "7")):
        with pytest.raises(ThreestepError, match="unknown (setting 'flag_of_before'|flag --flag_of_before)"):
            parse(*words, groups=groups)


@dataclass
class Beside:
    """Flags that only make sense beside another group's."""

    ranks: int | None = None

    def validate_beside(self, settings: Mapping[str, Any], mistakes: Mistakes) -> None:
        mistakes.require(self.ranks is None or settings["seed"] == 9, "--ranks expects --seed 9")


def test_a_group_sees_the_settings_of_all_groups(parse):
    assert parse("--ranks", "2", "--seed", "9", groups=[Beside, Run])[0] == Beside(2)
    with pytest.raises(ThreestepError, match="--ranks expects --seed 9"):
        parse("--ranks", "2", groups=[Beside, Run])
