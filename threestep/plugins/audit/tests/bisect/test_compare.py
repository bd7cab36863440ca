"""Two digests: the first quantity that differs, in the order of the data; drift and faults."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from threestep.plugins.audit.bisect.compare import FLOORS, JUMP, Comparison, compare
from threestep.plugins.audit.bisect.digest_files import (
    RunDigests,
    causes_of_rounding,
    environments_that_differ,
    read_digests,
)
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit

BEGIN = {
    "digests": 1, "begins_after": 0, "version": "0.1.0", "program": "training.step1_sft.main", "ranks": 1,
    "weights": {"train": {"embed": ["aa", 1.0, 2.0], "layers.0": ["bb", 2.0, 4.0]}},
}  # fmt: skip


def line(step: int, moved: float = 0.0) -> dict[str, Any]:
    """A step whose floats are `moved` away by themselves."""
    own = 1.0 + moved
    exact = f"{moved!r}"
    return {
        "step": step,
        "hashes": {"random": "r", "rows": "s", "train/ids": "i", "train/targets": "t", "train/logprobs": exact},
        "floats": {"train/logprobs": [4.0, -2.0 * own, 4.0, 1.0], "train/loss": [0.5 * own]},
        "figures": {"loss": 0.5 * own, "train/grad_norm": 2.0 * own, "train/learning_rate": 1e-3, "right": 3.0},
        "gradients": {"train": {"embed": 0.1 * own, "layers.0": 0.2}},
        "weights": {"train": {"embed": [exact, 1.0 * own], "layers.0": ["w", 2.0]}},
    }


def written(folder: Path, lines: list[dict[str, Any]], settings: str = "dtype: fp32\n", ranks: int = 1) -> RunDigests:
    folder.mkdir(parents=True)
    content = [{**BEGIN, "ranks": ranks}, *lines]
    (folder / "digests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in content))
    (folder / "config.yaml").write_text(settings)
    return read_digests(folder)


def compared(tmp_path: Path, change: Any, ranks: int = 1, drift: float = 0.0, steps: int = 4) -> Comparison:
    lines = [line(step) for step in range(1, steps + 1)]
    others = copy.deepcopy([line(step, drift * step) for step in range(1, steps + 1)])
    change(others)
    a, b = written(tmp_path / "a", lines), written(tmp_path / "b", others, ranks=ranks)
    return compare(a, b, causes_of_rounding(a, b))


def set_at(*path: Any) -> Any:
    """Without a path: nothing."""

    def change(lines: list[dict[str, Any]]) -> None:
        place: Any = lines
        for word in path[:-2]:
            place = place[word]
        if path:
            place[path[-2]] = path[-1]

    return change


def without_layers(lines: list[dict[str, Any]]) -> None:
    del lines[1]["weights"], lines[1]["gradients"]


EQUAL = set_at()
BELOW = set_at(2, "floats", "train/loss", [0.5 * 1.0001])  # five times the floor, half the bound


@pytest.mark.parametrize(
    ("change", "ranks", "drift"),
    [
        (EQUAL, 1, 0.0),
        (EQUAL, 2, 1e-7),  # drift is no fault
        (BELOW, 2, 1e-6),  # the bound grows with what was seen
        (set_at(0, "hashes", "random", "x"), 2, 0.0),  # random states of other ranks are others
        (without_layers, 1, 0.0),
    ],
    ids=["equal", "drift", "below the bound", "random states", "without layers"],
)
def test_runs_without_a_first_difference(tmp_path: Path, change, ranks, drift):
    found = compared(tmp_path, change, ranks, drift)
    assert (found.first, found.random_from, len(found.steps)) == (None, None, 4)
    assert found.of_rounding == ("1 and 2 ranks",) * (ranks > 1)
    if change is EQUAL and drift:
        assert [found.drift[step, 0] for step in (1, 4)] == pytest.approx([1e-7, 4e-7], rel=1e-3)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("hashes", "random", "x"), ("data", "random", "")),
        (("hashes", "rows", "x"), ("data", "rows", "")),
        (("hashes", "train/ids", "x"), ("data", "ids", "")),
        (("hashes", "train/targets", "x"), ("data", "targets", "")),
        (("hashes", "train/logprobs", "x"), ("forward", "logprobs", "")),
        (("floats", "train/loss", [0.6]), ("forward", "loss", "")),
        (("figures", "train/grad_norm", 2.1), ("backward", "grad_norm", "")),
        (("gradients", "train", "embed", 0.11), ("backward", "gradient", "embed")),
        (("figures", "train/learning_rate", 2e-3), ("optimizer", "learning_rate", "")),
        (("weights", "train", "layers.0", ["x", 2.0]), ("optimizer", "weights", "layers.0")),
    ],
)
def test_each_quantity_is_found_at_its_step(tmp_path: Path, path, expected):
    first = compared(tmp_path, set_at(2, *path)).first
    assert first is not None and first.key == (3, 0) and first.last == (2, 0) and not first.bound
    assert (first.compared.part, first.compared.name, first.compared.layer) == expected


def test_the_first_of_several_is_that_of_the_data(tmp_path: Path):
    def change(lines: list[dict[str, Any]]) -> None:
        set_at(1, "weights", "train", "embed", ["x", 1.1])(lines)
        set_at(1, "hashes", "train/logprobs", "x")(lines)
        set_at(1, "gradients", "train", "layers.0", 0.3)(lines)

    first = compared(tmp_path, change).first
    assert first is not None and first.compared.name == "logprobs"
    assert [each.name for each in first.others] == ["gradient", "weights"]


def test_a_jump_is_a_fault(tmp_path: Path):
    first = compared(tmp_path, set_at(2, "floats", "train/loss", [0.51]), ranks=2, drift=1e-7).first
    assert first is not None and first.key == (3, 0) and first.compared.name == "loss"
    assert first.bound == FLOORS["fp32"] and first.compared.apart > first.bound
    assert first.before == pytest.approx(2e-7, rel=1e-3)
    beyond = set_at(2, "floats", "train/loss", [0.5 * 1.0005])
    first = compared(tmp_path / "more", beyond, ranks=2, drift=1e-6).first
    assert first is not None and first.bound == pytest.approx(JUMP * 2 * 1e-6, rel=1e-2)


@pytest.mark.parametrize("value", [None, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "path", [("train/loss", [...]), ("train/logprobs", [4.0, 1.0, ..., 1.0])], ids=["loss", "sums"]
)
def test_a_number_that_is_not_finite_is_a_fault(tmp_path: Path, path, value: float | None):
    name, numbers = path[0], [value if number is ... else number for number in path[1]]
    first = compared(tmp_path, set_at(2, "floats", name, numbers), ranks=2, drift=1e-7).first
    assert first is not None and first.key == (3, 0) and first.compared.apart == float("inf")


def test_data_must_be_equal_whatever_is_rounded(tmp_path: Path):
    first = compared(tmp_path, set_at(3, "hashes", "train/targets", "x"), ranks=2).first
    assert first is not None and first.key == (4, 0) and first.compared.name == "targets"


def test_the_weights_of_the_beginning(tmp_path: Path):
    a = written(tmp_path / "a", [line(1)])
    b = written(tmp_path / "b", [line(1)])
    layers = b.begin["weights"]["train"]
    layers["layers.0"] = ("cc", *layers["layers.0"][1:])
    first = compare(a, b, ()).first
    assert first is not None and first.key == (0, 0) and first.compared.layer == "layers.0"


def test_sums_that_were_not_finite_are_compared(tmp_path: Path):
    lost = set_at(0, "floats", "train/logprobs", [3.0, None, None, None])
    found = compared(tmp_path, lost, ranks=2)
    assert found.first is not None and found.first.compared.name == "logprobs"
    runs = [written(tmp_path / name, [line(1)]) for name in ("c", "d")]
    for run in runs:
        run.steps[1, 0]["floats"]["train/logprobs"] = (3.0, None, None, None)  # type: ignore[index]
    assert compare(*runs, ("2 and 1 ranks",)).first is None


def test_flags_of_layout_may_round(tmp_path: Path):
    a = written(tmp_path / "a", [line(1)], "dtype: fp32\nzero_stage: 0\nlearning_rate: 0.1\noutput_dir: a\n")
    b = written(tmp_path / "b", [line(1)], "dtype: fp32\nzero_stage: 3\nlearning_rate: 0.2\noutput_dir: b\n")
    assert causes_of_rounding(a, b) == ["--zero_stage 0 and 3"]


def test_mistakes_are_sentences(tmp_path: Path):
    with pytest.raises(ThreestepError, match="has no digests.jsonl"):
        read_digests(tmp_path)
    a = written(tmp_path / "a", [line(1)])
    other = {**BEGIN, "program": "training.step2_dpo.main"}
    b = RunDigests(tmp_path, other, (), a.steps, {}, {})
    with pytest.raises(
        ThreestepError, match="only if they come from the same program, got training.step1_sft.main and"
    ):
        compare(a, b, ())
    for content, words in (
        ('{"digests": 9}\n', "has digests of version 9, but this threestep reads version 1;"),
        ("{", r"digests.jsonl, line 1: expects JSON"),
        ('{"step": 1}\n', "has no `digests`: the file is incomplete"),
    ):
        (tmp_path / "a" / "digests.jsonl").write_text(content)
        with pytest.raises(ThreestepError, match=words):
            read_digests(tmp_path / "a")


def test_states_of_generators_are_looked_at_in_all_steps(tmp_path: Path):
    def change(lines: list[dict[str, Any]]) -> None:
        for each in lines[2:]:
            each["hashes"]["random"] = "x"
        set_at(1, "floats", "train/loss", [0.6])(lines)

    found = compared(tmp_path, change)
    assert found.random_from == (3, 0) and found.first is not None and found.first.key == (2, 0)


@pytest.mark.parametrize("devices", [("1 rank on cpu, 1 thread", "1 rank on cuda, 1 thread"), ("", "")])
def test_states_of_another_device_are_others(tmp_path: Path, devices):
    a, b = written(tmp_path / "a", [line(1)]), written(tmp_path / "b", [line(1)])
    b.steps[1, 0]["hashes"]["random"] = "x"
    a, b = (replace(run, environment={"device": words}) for run, words in zip((a, b), devices, strict=True))
    assert compare(a, b, ()).random_from == (None if devices[0] else (1, 0))


def test_the_environments_of_two_runs(tmp_path: Path):
    def about(device: str, transformers: str, **more: str) -> dict[str, Any]:
        return {"device": device, "versions": {"torch": "2.13.0", "transformers": transformers}, **more}

    one = about("1 rank on cpu, 1 thread (of 2 cores)", "5.19.0", commit="aa")
    two = about("2 ranks on cpu, 1 thread each (OMP_NUM_THREADS)", "5.24.0", commit="bb+")
    assert environments_that_differ(one, two) == {"transformers": ("5.19.0", "5.24.0"), "commit": ("aa", "bb+")}
    assert environments_that_differ(one, {}) == {}
    runs = [replace(written(tmp_path / name, [line(1)]), environment=each) for name, each in (("a", one), ("b", two))]
    assert causes_of_rounding(*runs) == ["transformers 5.19.0 and 5.24.0"]  # a commit alone is to change no bit
    three = about("1 rank on cpu, 2 threads (of 2 cores)", "5.19.0")
    assert [run.threads for run in (*runs, replace(runs[0], environment=three))] == [1, 1, 2]
    assert replace(runs[0], environment={}).threads is None
    assert environments_that_differ(one, three) == {"": ("cpu, 1 thread", "cpu, 2 threads")}
