"""Rounds of sampling and training, as settings of programs: best of n with the last round's model, DPO on best against
worst, and an evaluation on held-out prompts. Serves threestep all. Knows the programs by their names, and starts none.

A round reads its own part of the prompts, so that none is answered twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.evaluation.arguments import EVALUATE_GROUPS
from threestep.plugins.evaluation.best_of.arguments import BEST_OF_GROUPS
from training.utils.data.arguments import SHARED_SPLIT, SourceArguments, whole_split
from training.utils.flags.arguments import defaults_of
from training.utils.rewards.table import reward_name

if TYPE_CHECKING:
    from training.utils.flags.step import Step

FOLDER, ROWS = "rounds", "rows.jsonl"
DRAWING, JUDGING = "best_of", "evaluation"
_RESULTS = {DRAWING: "best_of.json", JUDGING: "reward.json"}  # which each leaves last


class Stage(NamedTuple):
    """One program of a round. words: that stand before its flags. settings: complete. result: the file that it leaves
    last."""

    name: str
    title: str
    module: str
    groups: tuple[type, ...]
    words: tuple[str, ...]
    settings: dict[str, Any]
    result: Path

    @property
    def folder(self) -> Path:
        return self.result.parent


@dataclass(frozen=True)
class TrainingRounds:
    """count: of rounds. folder: of the whole run. first_model: that round 1 starts from. common, drawing, training:
    settings of all programs, of best of n, and of the step. step: that trains on pairs."""

    count: int
    folder: Path
    first_model: str
    common: Mapping[str, Any]
    drawing: Mapping[str, Any]
    training: Mapping[str, Any]
    step: Step

    def stages(self) -> list[Stage]:
        """All programs, in their order; round 0 is the evaluation of the first model."""
        found = [self._judging(0)]
        for number in range(1, self.count + 1):
            found += [self._drawing(number), self._training(number), self._judging(number)]
        return found

    def model_after(self, number: int) -> str:
        """The model that a round leaves; round 0's is the first model."""
        return str(self._place(number, self.step.name) / "model") if number else self.first_model

    def _place(self, number: int, name: str) -> Path:
        return self.folder / FOLDER / str(number) / name

    def _asked(self) -> dict[str, Any]:
        """Settings of the programs that read prompts: shares of the data are those of the steps."""
        return {"data_split": SHARED_SPLIT, **self.common, **self.drawing}

    def _drawing(self, number: int) -> Stage:
        place = self._place(number, DRAWING)
        settings = {"part": f"{number}/{self.count}", **_known(self._asked(), BEST_OF_GROUPS)}
        settings |= {name: self.drawing[name] for name in self.drawing}  # unknown ones fail there
        settings |= {"model_name_or_path": self.model_after(number - 1), "output_dir": str(place)}
        title, result = f"round {number} of {self.count}, best of n", place / _RESULTS[DRAWING]
        return Stage(DRAWING, title, "threestep.plugins.evaluation.best_of", BEST_OF_GROUPS, (), settings, result)

    def _training(self, number: int) -> Stage:
        place, rows = self._place(number, self.step.name), self._place(number, DRAWING) / ROWS
        common = {name: value for name, value in self.common.items() if name not in _OF_SOURCES}
        settings = {**common, "data_split": whole_split(int(self.step.number)), **self.training}
        settings |= {"data_path": [f"jsonl:{rows}"], "data_format": "preference"}
        settings |= {"model_name_or_path": self.model_after(number - 1), "output_dir": str(place)}
        title, result = f"round {number} of {self.count}, {self.step.title}", place / "summary.json"
        return Stage(self.step.name, title, self.step.program, self.step.groups, (), settings, result)

    def _judging(self, number: int) -> Stage:
        place = self._place(number, JUDGING)
        settings = {**_known(self._asked(), EVALUATE_GROUPS), "split": "eval", "reward": judged_by(self.drawing)}
        settings |= {"model_name_or_path": self.model_after(number), "output_dir": str(place)}
        title = f"round {number} of {self.count}, held-out prompts"
        return Stage(
            JUDGING,
            title,
            "threestep.plugins.evaluation.evaluate",
            EVALUATE_GROUPS,
            ("reward",),
            settings,
            place / _RESULTS[JUDGING],
        )


def judged_by(drawing: Mapping[str, Any]) -> str:
    """The --reward of the evaluation: that of best of n and, of weight 0, its checker."""
    reward, checker = str(drawing.get("reward", "model")), drawing.get("checker")
    names = [reward_name(entry) for entry in reward.split(",")]
    return reward if checker is None or reward_name(checker) in names else f"{reward},{checker}:0"


def figures_of(stages: Sequence[Stage], results: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """A row for each round, of what its programs left: reward and checker on held-out prompts, pairs it trained on and
    the accuracy on held-out ones."""
    rows: list[dict[str, float | None]] = []
    row: dict[str, float | None] = {}
    for stage, result in zip(stages, results, strict=True):
        if stage.name == DRAWING:
            row |= {"pairs": result.get("pairs")}
        elif stage.name == JUDGING:
            names = [name for name in result if name == "reward" or name.startswith("reward/") and "@" not in name]
            found = {name: result[name] for name in names if isinstance(result[name], dict)}
            row |= {name: figure["value"] for name, figure in found.items() if "value" in figure}
            rows.append({"round": float(len(rows)), **row})
            row = {}
        else:
            row |= {"pair_accuracy": result.get("eval_accuracy")}
    return rows


def table_of(rows: Sequence[Mapping[str, float | None]]) -> str:
    """The rows of `figures_of`, in Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(name: str, value: float | None) -> str:
        return "" if value is None else f"{value:.0f}" if name in ("round", "pairs") else f"{value:.4f}"

    lines = [[name.replace("_", " ") for name in names], ["---:"] * len(names)]
    lines += [[cell(name, row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _known(settings: Mapping[str, Any], groups: tuple[type, ...]) -> dict[str, Any]:
    flags = defaults_of(groups)
    return {name: value for name, value in settings.items() if name in flags}


# Of the prompts' files.
_OF_SOURCES = frozenset(defaults_of((SourceArguments,))) - {"dataset_module"} | {"allow_image_urls"}
