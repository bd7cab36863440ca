"""GSM8K for all three steps: `--dataset_module examples/gsm8k.py --data_path data/gsm8k`.

The folder, whose path ends in /gsm8k, contains the files as published (ADDRESS): train.jsonl and test.jsonl (question,
answer) and example_model_solutions.jsonl (each test question with the solutions of four models and whether they are
right; the name model_solutions.jsonl is read too). With `--data_path gsm8k` alone, train and test come from the hub,
which has no model solutions and so no pairs for phase 2.

Which rows serve which phase:
- training questions: phases 1 and 3, shared by `--data_split`; they have no wrong solution, so no pair.
- model solutions: only phase 2, one pair for each wrong solution (the truth against it).
- evaluation: the model solutions answer the *test* questions, so the reward model learns from those. Every fifth test
  question is held out from all phases: its text evaluates phases 1 and 3, its pairs phase 2. The other test
  questions are used only for training in phase 2.

`get_reference` is the final answer, the number behind ####, without thousands separators.
"""

from __future__ import annotations

import os
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Expected
from training.utils.data.files.digests import digest_files
from training.utils.data.files.json_rows import JsonLines
from training.utils.data.raw_dataset import PromptRawDataset, load_by_name
from training.utils.data.registry import register_dataset

HELD_OUT_EVERY = 5
ADDRESS = "https://github.com/openai/grade-school-math/tree/master/grade_school_math/data"
SOLUTIONS = ("model_solutions.jsonl", "example_model_solutions.jsonl")  # the second is its published name
FILES = ("train.jsonl", "test.jsonl", SOLUTIONS[1])
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@register_dataset("gsm8k", "openai/gsm8k")
class Gsm8k(PromptRawDataset):
    """Rows: {"question", "answer", "wrong" (a wrong solution, None in rows for phases 1 and 3)}."""

    dataset_dir_remedy = f"download {', '.join(FILES)} from {ADDRESS} into it"

    def load_raw_datasets(self, dataset_name: str) -> dict[str, list[dict[str, Any]]] | None:
        self._folder = self.dataset_dir
        self._rows: dict[str, list[dict[str, Any]]] | None = None
        for path in self._paths():
            if not os.path.isfile(path):
                raise ThreestepError(f"gsm8k: there is no file '{path}'; {self.dataset_dir_remedy}")
        return None

    def _paths(self) -> list[str]:
        """Train, test and solutions in the folder; none without a folder."""
        if self._folder is None:
            return []
        places = [os.path.join(self._folder, name) for name in SOLUTIONS]
        solutions = next((place for place in places if os.path.isfile(place)), places[-1])
        return [*(os.path.join(self._folder, name) for name in FILES[:2]), solutions]

    def get_fingerprint(self) -> str | None:
        return digest_files(self._paths(), self.output_path) if self._paths() else None

    def get_train_data(self) -> list[dict[str, Any]]:
        return self._read()["train"]

    def get_eval_data(self) -> list[dict[str, Any]]:
        return self._read()["eval"]

    def get_phases(self, sample: dict[str, Any]) -> tuple[int, ...]:
        return (1, 3) if sample["wrong"] is None else (2,)

    def get_prompt(self, sample: dict[str, Any]) -> str:
        return f"Human: {sample['question']} Assistant:"

    def get_chosen(self, sample: dict[str, Any]) -> str:
        return " " + sample["answer"]

    def get_rejected(self, sample: dict[str, Any]) -> str | None:
        return None if sample["wrong"] is None else " " + sample["wrong"]

    def get_reference(self, sample: dict[str, Any]) -> str:
        return final_answer(sample["answer"])

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        if self._rows is None:
            train, test, solved = self._sources()
            pairs = [pair for row in solved for pair in _pairs(row)]
            held_out = {row["question"] for row in list(test)[::HELD_OUT_EVERY]}
            solutions = [_solution(row) for row in train]
            self._rows = {
                "train": solutions + [pair for pair in pairs if pair["question"] not in held_out],
                "eval": [_solution(row) for row in test if row["question"] in held_out]
                + [pair for pair in pairs if pair["question"] in held_out],
            }
        return self._rows

    def _sources(self) -> tuple[Any, Any, Any]:
        if self._folder is None:
            hub = load_by_name("openai/gsm8k", "main")
            return hub["train"], hub["test"], []
        needed: tuple[tuple[str, ...], ...] = (
            ("question", "answer"),
            ("question", "answer"),
            ("question", "ground_truth", *MODELS),
        )
        train, test, solved = (
            JsonLines(path, Expected(columns, columns[:2])) for path, columns in zip(self._paths(), needed, strict=True)
        )
        return train, test, solved


def _solution(row: dict[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "answer": row["answer"], "wrong": None}


def _pairs(row: dict[str, Any]) -> list[dict[str, Any]]:
    """One pair for each wrong solution, no solution twice. The file ends solutions with "A: 18", the rest of
    GSM8K with "#### 18": the latter stands in both, so that a reward model cannot tell them by it."""
    for model in MODELS:
        if not isinstance(row[model], dict) or not {"is_correct", "solution"} <= row[model].keys():
            raise ThreestepError(
                f"gsm8k: model_solutions.jsonl, question {row['question'][:40]!r}: expected an object with "
                f"is_correct and solution under '{model}', got {row[model]!r}"
            )
    truth = _with_hashes(row["ground_truth"])
    wrong = dict.fromkeys(row[model]["solution"] for model in MODELS if not row[model]["is_correct"])
    return [{"question": row["question"], "answer": truth, "wrong": _with_hashes(solution)} for solution in wrong]


def _with_hashes(solution: str) -> str:
    """The same solution with its last line "A: 18" as "#### 18"."""
    body, newline, last = solution.rpartition("\n")
    return f"{body}{newline}#### {last[len('A: ') :]}" if last.startswith("A: ") else solution


def final_answer(solution: str) -> str:
    """What stands behind the last ####, without thousands separators and blanks; "" where there is none."""
    _, hashes, answer = solution.rpartition("####")
    return answer.strip().replace(",", "") if hashes else ""
