"""The frame of the table of the field: verdicts of several methods, the rows of batches, the page from results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.conformance.cell import see
from benchmarks.conformance.environments import ENVIRONMENTS
from benchmarks.conformance.field import KINDS, PROPERTIES, TRAINERS
from benchmarks.conformance.page import page
from benchmarks.conformance.seen import Document, MicroBatch, documents, off
from benchmarks.conformance.threads import THREADS
from benchmarks.conformance.verdicts import DISPUTED, NO, NOT_RUN, YES, View, answer_of, size

ROOT = Path(__file__).parents[3]
RIGHT, WRONG = View("one", True, "equal"), View("other", False, "20 % off")


@pytest.mark.parametrize(
    ("views", "answer"),
    [([], NOT_RUN), ([RIGHT, RIGHT], YES), ([RIGHT, WRONG], DISPUTED), ([WRONG], DISPUTED), ([WRONG, WRONG], NO)],
)
def test_a_no_takes_two_methods(views: list[View], answer: str):
    assert answer_of(views) == answer


def test_differences_in_words():
    assert [size(share) for share in (0.0, 3e-5, 0.203, 12.0, float("nan"))] == [
        "equal",
        "3e-05 of its size",
        "20.3 % off",
        "12 times its size off",
        "not finite",
    ]
    assert off(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == 1.0


def test_rows_lose_their_padding_on_either_side():
    ids = torch.tensor([[0, 0, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    labels = torch.tensor([[-100, -100, -100, 8, 9]])
    row = Document((7, 8, 9), (False, True, True))
    assert documents([MicroBatch(ids, mask, None, labels)]) == [row]
    assert documents([MicroBatch(ids.flip(1), mask.flip(1), None, labels.flip(1))]) == [
        Document((9, 8, 7), (False, True, False))  # the first token of a row is predicted by nothing
    ]


@pytest.mark.parametrize(
    "marks", [{"positions": torch.tensor([[0, 1, 0, 1, 2]])}, {"mask": torch.tensor([[1, 1, 2, 2, 2]])}]
)
def test_packed_rows_are_told_apart(marks: dict[str, torch.Tensor]):
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    batch = MicroBatch(ids, labels=ids.clone(), **marks)
    assert documents([batch]) == [Document((5, 6), (False, True)), Document((7, 8, 9), (False, True, True))]


def test_tokens_learned_are_those_after_a_gradient():
    batch = MicroBatch(torch.tensor([[5, 6, 7]]), trained=torch.tensor([[False, True, False]]))
    assert documents([batch], "trained") == [Document((5, 6, 7), (False, False, True))]


class Adapter:
    """A trainer that has no DPO, and one property that its user decides."""

    LACKS = {"chat_tokens": "takes token ids"}


@pytest.mark.parametrize(("name", "why"), [("chat_tokens", "takes token ids"), ("dpo_loss", "has no dpo")])
def test_what_a_trainer_lacks_is_not_run(name: str, why: str):
    cell = see(Adapter, name)
    assert (cell.answer, cell.why) == (NOT_RUN, why)


def test_every_trainer_and_property_has_its_parts():
    folder = ROOT / "benchmarks" / "conformance"
    for trainer in TRAINERS.values():
        assert (folder / "adapters" / f"{trainer.adapter}.py").exists()
        assert trainer.environment == "threestep" or trainer.environment in ENVIRONMENTS
        assert set(trainer.kinds) <= set(KINDS)
    for name, known in PROPERTIES.items():
        assert f"def {name}(" in (folder / "properties" / f"{known.kind}.py").read_text()
    assert all(trainer in TRAINERS and name in PROPERTIES for trainer, name in THREADS)


def cell(answer: str, **more: object) -> dict[str, object]:
    kept = {"answer": answer, "views": [], "settings": "", "by_default": [], "why": "", "note": "", "versions": {}}
    return {**kept, "date": "2026-11-26", **more}


def test_the_page_says_how_much_a_no_is_and_what_a_yes_takes():
    wrong = [vars(WRONG), vars(View("logged loss", False, "3 % off (4x2)"))]
    text = page(
        {
            "trl-1.16": {
                "accumulation": cell("no", views=wrong),
                "packing": cell("yes", settings="neat: true", by_default=wrong),
                "ranks": cell("not run", why="no launcher"),
                "resume": cell("yes"),
            }
        }
    )
    lines = text.splitlines()
    row = {line.split("`")[1]: line.split("|")[2].strip() for line in lines if line.startswith("| `") and ":" in line}
    assert row == {
        "accumulation": "**no**: 20 % off",
        "packing": "yes with `neat: true`",
        "ranks": "not run: no launcher",
        "resume": "yes",
    }
    detail = [line for line in lines if line.startswith("- `trl")]
    assert len(detail) == 2 and "logged loss: 3 % off (4x2)" in detail[0] and "by default" in detail[1]


def test_the_page_is_that_of_the_results():
    results = {
        path.stem: json.loads(path.read_text())
        for name in TRAINERS
        if (path := ROOT / "benchmarks" / "conformance" / "results" / f"{name}.json").exists()
    }
    assert (ROOT / "docs" / "conformance.md").read_text() == page(results)
