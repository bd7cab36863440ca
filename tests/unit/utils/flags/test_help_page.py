"""`--help`: what each flag says, the first page, the topics. Texts are read of every program that has dataclasses."""

from __future__ import annotations

import dataclasses
import importlib
import re

import pytest

from tests.support import boundary
from threestep.command import commands
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import _parts
from training.utils.flags.flags import OTHER, TOPICS, UNIT, flag
from training.utils.flags.help_page import as_typed, entries_of, help_page, requested_topic
from training.utils.flags.step import known_steps
from training.utils.plugins.registry import plugins, topics

# What a number counts, as `--help` shows it behind the flag; for a text or a path, what it names.
UNITS = frozenset(
    {
        "characters", "checkpoints", "covariance", "epochs", "evaluations", "factor", "gib",
        "gigabytes", "money", "heads", "index", "layers", "mib", "nats", "norm", "number", "passes", "paths", "port",
        "probability", "processes", "prompts", "rank", "ranks", "rate", "ratio", "responses", "rollouts",
        "rows", "samples", "score", "seconds", "seed", "sequences", "share", "stage", "steps", "temperature",
        "tiles", "tokens", "tries", "units", "weights",
    }
)  # fmt: skip

PROGRAMS = [step.program for step in known_steps().values()]
PROGRAMS += [
    f"threestep.plugins.{name}"
    for name in (
        "evaluation.best_of.__main__", "evaluation.chat", "environments.__main__", "evaluation.evaluate",
        "inspect.__main__", "programs.new_model", "plan.__main__", "inspect.preview",
        "evaluation.reward_evaluation.__main__",
    )
]  # fmt: skip
PROGRAMS = [each for each in PROGRAMS if boundary.plugin_of(each) in {None, *plugins()}]
# Besides steps, those with a first page of their own.
FIRST_PAGES = tuple(
    f"threestep.plugins.{name}"
    for name in ("evaluation.best_of.__main__", "environments.__main__", "evaluation.evaluate", "programs.new_model")
)


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def parts_of(program: str) -> list[type]:
    steps = {step.program: step.groups for step in known_steps().values()}
    groups = steps.get(program) or importlib.import_module(program).GROUPS
    return [part for group in groups for part in _parts(group)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_has_a_sentence_a_topic_and_its_unit_if_it_is_a_number(program):
    for topic, field, shown in entries_of(parts_of(program)):
        text = field.metadata["help"]
        assert topic in {*TOPICS, *topics()}, shown
        assert re.fullmatch(r"['`]?\w.{8,}[.)]", text, re.S), (shown, text)
        assert not text[0].islower() or text.split()[0].strip(":,'") == text.split()[0].strip(":,'").lower(), text
        is_number = re.search(r"\b(int|float)\b", str(field.type)) is not None
        assert not is_number or field.metadata[UNIT] in UNITS, f"{shown}: a number needs its unit"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_of_everything_has_each_flag_once_in_one_spelling(program):
    parts = parts_of(program)
    page = help_page(parts, "threestep it", "It is done.", "all")
    shown = re.findall(r"^  --([\w-]+)", page, re.M)
    assert sorted(shown) == sorted([field.name for part in parts for field in dataclasses.fields(part)] + ["config"])
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_use_flags_that_the_page_lists(program):
    """Examples use the names that the page lists, not earlier or foreign ones."""
    parts = parts_of(program)
    listed = {*re.findall(r"^  --([\w-]+)", help_page(parts, "threestep it", "", "all"), re.M), "num_ranks"}
    module = importlib.import_module(program)
    own = importlib.import_module(program.removesuffix(".__main__"))
    words = {name for name, command in commands().items() if importlib.import_module(command.module) in (module, own)}
    examples = re.sub(r"\\\n\s*", "", module.__doc__ or "")
    lines = [
        line for line in examples.splitlines() if any(line.strip().startswith(f"threestep {name} ") for name in words)
    ]
    given = {flag for line in lines for flag in re.findall(r" --(\w[\w-]*)", line)}
    assert sorted(given - listed) == []


@pytest.mark.parametrize(("columns", "most_lines"), [(80, 42), (100, 40), (120, 36)])
@pytest.mark.parametrize("name", known_steps())
def test_the_first_page_of_a_step_fits_a_screen(name, columns, most_lines, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    step = known_steps()[name]
    description = importlib.import_module(step.program).__doc__ or ""
    page = help_page(parts_of(step.program), "threestep it", description, "", first_flags=step.first_flags)
    assert page.startswith("usage: threestep it [flags]\n\n")
    extra = 8 if name == "step3_ppo" else 0  # two models, two lengths, two batches
    assert 24 <= len(page.splitlines()) <= most_lines + extra
    first = re.findall(r"^  --(\w+)", page, re.M)
    assert first == list(step.first_flags)
    for needed in ("model_name_or_path", "data_path", "output_dir", "seq_len", "batch_size", "learning_rate", "epochs"):
        assert any(needed in each for each in first), needed
    assert "num_ranks" in first and "\n  threestep it --" in page  # an example, as one types it
    assert "python -m" not in page


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each in FIRST_PAGES])
def test_the_first_page_of_another_program_has_what_a_first_run_needs(program, capsys):
    """And no more: these programs have 60 to 100 flags."""
    module = importlib.import_module(program)
    with pytest.raises(SystemExit):
        module.main(["--help"])
    said = capsys.readouterr().out
    assert re.findall(r"^  --(\w+)", said, re.M) == list(module.FIRST_FLAGS) and len(module.FIRST_FLAGS) <= 16
    assert " --help all shows every flag" in said


def test_a_page_of_one_topic():
    parts = parts_of("training.step1_sft.main")
    page = help_page(parts, "threestep sft", "", "checkpoints")
    assert page.startswith("usage: threestep sft [flags]\n\nCheckpoints and resuming:\n  --save_every STEPS ")
    assert "--seed" not in page and "--resume [CHECKPOINT]" in page
    one = help_page(parts, "threestep sft", "", "save_every").splitlines()
    assert one[2].endswith(":") and one[3].startswith("  --save_every STEPS ") and page.count("--") > 1
    assert "--save_epochs" not in "".join(one)
    with pytest.raises(
        ThreestepError, match=r"--help expects model, data, .* all or a flag's name, or nothing.* got 'chekpoints'"
    ):
        help_page(parts, "threestep sft", "", "chekpoints")


@dataclasses.dataclass
class Made:
    number: int = flag(3, "How many. The more the better.", "rows >= 0")
    rate: float = flag(2e-5, "How fast.", "rate", topic="optimizer")
    kind: str = flag("one", "Which.", choices=("one", "two"))
    texts: list[str] = flag([], "What.", "text")
    yes: bool = flag(True, "Whether.")
    maybe: float | None = flag(None, "Perhaps; default: not.", "seconds")
    open: bool | None = flag(None, "Left open.", takes_auto=True)
    some: int | None = flag(4, "Some.", "rows >= 0", takes_auto=True)


def test_how_flags_look():
    shown = {field.name: (topic, text) for topic, field, text in entries_of([Made])}
    assert shown == {
        "number": (OTHER, "--number ROWS"), "rate": ("optimizer", "--rate RATE"), "kind": (OTHER, "--kind one|two"),
        "texts": (OTHER, "--texts TEXT ..."), "yes": (OTHER, "--yes true|false"), "maybe": (OTHER, "--maybe SECONDS"),
        "open": (OTHER, "--open true|false|auto"), "some": (OTHER, "--some ROWS|auto"),
    }  # fmt: skip
    lines = help_page(
        [Made], "it", "It does.\n\n    python -m training.it --number 5 \\\n        --yes false"
    ).splitlines()
    assert lines[:6] == ["usage: it [flags]", "", "It does.", "", "  it --number 5 \\", "    --yes false"]
    piped = as_typed('It.\n\n    echo "a" | python -m training.it --x\n    python -m training.it\nSo.', "threestep it")
    assert piped == ["It.", "", '    echo "a" | threestep it --x', "    threestep it", "So."]
    assert {re.sub(r" +", " ", line) for line in lines} >= {
        " --number ROWS How many. The more the better. [3]", " --rate RATE How fast. [2e-05]",
        " --yes true|false Whether. [true]", " --maybe SECONDS Perhaps; default: not.",
        " --open true|false|auto Left open. [auto]", " --some ROWS|auto Some. [4]",
    }  # fmt: skip
    brief = help_page([Made], "it", "It does.", "", first_flags=["number", "config"])
    assert re.search(r"--number ROWS +How many\. \[3\]\n", brief) and "--rate" not in brief


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], None), (["--seed", "3"], None), (["--help"], ""), (["-h"], ""), (["--seed", "3", "--help", "all"], "all"),
        (["--help=data"], "data"), (["--help", "--seed"], ""), (["--helper"], None),
    ],
)  # fmt: skip
def test_what_is_asked_for(argv, wanted):
    assert requested_topic(argv) == wanted
