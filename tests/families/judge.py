"""Judges one family: builds it, asks every question, and sums the answers up in one verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.families.answers import REFUSED, TRACEBACK, WRONG, Answer, asked, placed
from tests.families.builds import build, quiet
from tests.families.configs import PAD
from tests.families.learning import ask_lora, ask_ratio, ask_reward, ask_routers, ask_sft
from tests.families.reading import ask_rollout, ask_rows, ask_saving, load
from tests.families.sharding import CASES, ask_zero
from tests.families.subjects import LONG, Subject, alone, documents, known
from training.utils.engine.ranks.startup import started_process_group
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel

Question = Callable[[Subject, Path], list[Answer]]
QUESTIONS: dict[str, Question] = {
    "rows": ask_rows, "save": ask_saving, "rollout": ask_rollout, "lora": ask_lora, "ratio": ask_ratio,
    "routers": ask_routers,
}  # fmt: skip


def ask_engine(subject: Subject, place: Path, skipped: Sequence[str]) -> list[Answer]:
    """The questions that need a process group, of one rank."""
    with started_process_group() as ranks:
        questions: dict[str, Callable[[], list[Answer]]] = {
            "sft": lambda: ask_sft(subject, ranks),
            "reward": lambda: ask_reward(subject, place, ranks),
            **{
                f"zero{stage}.{dtype}": partial(ask_zero, subject, place, ranks, stage, dtype) for stage, dtype in CASES
            },
        }
        return [answer for name, find in questions.items() if name not in skipped for answer in asked(name, find)]


def judged(family: str, place: Path, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Return, as JSON values, what is found about a family. place: an empty folder. skipped: questions."""
    import torch

    torch.set_num_threads(1)
    quiet()
    started = time.monotonic()
    result: dict[str, Any] = {"family": family, "model": "", "built": "", "answers": []}
    try:
        folder = place / "start"
        model = build(family, folder)
        result |= {"model": type(model).__name__, "weights": sum(weight.numel() for weight in model.parameters())}
        subject = known(family, folder)
    except Exception as problem:  # noqa: BLE001 - why plain transformers cannot build a family is the answer
        return result | {"built": why_not_built(problem)}
    result |= {
        "dtype": str(subject.dtype).removeprefix("torch."),
        "runs": subject.runs,
        "looks_ahead": subject.looks_ahead,
    }
    answers: list[Answer] = []
    # What plain transformers does not compute either has no truth: it is to be refused, and nothing else is asked.
    # One that looks ahead is to be refused as well.
    questions: dict[str, Question] = {**QUESTIONS, "engine": partial(ask_engine, skipped=skipped)}
    if subject.runs or not subject.is_causal:
        questions = {"runs": ask_to_run} if subject.runs else {"rows": ask_rows}
    for name, question in questions.items():
        if refused(answers):
            break
        if name in skipped:
            continue
        answers += asked(name, lambda question=question: question(subject, place))  # type: ignore[misc]
    return result | {
        "answers": [answer.as_json() for answer in answers],
        "verdict": verdict(subject, answers),
        "seconds": round(time.monotonic() - started, 1),
    }


def why_not_built(problem: Exception) -> str:
    package = re.search(r"requires the (\S+) library", str(problem))
    return f"needs the package {package[1]}" if package else placed(problem)


def ask_to_run(subject: Subject, place: Path) -> list[Answer]:
    """A model that computes nothing from token ids alone ends in one sentence."""
    rows = padded_rows(alone(documents(LONG)), PAD)
    PolicyModel(load(subject.folder, subject.dtype))(rows)
    return [Answer("runs", WRONG, None, f"it runs here and not in plain transformers ({subject.runs})")]


def refused(answers: list[Answer]) -> str:
    """Return the sentence in which a run with this family ends; "" if it trains."""
    names = ("runs", "rows", "rows.padded")
    return next((one.said for one in answers if one.question in names and one.verdict == REFUSED), "")


def verdict(subject: Subject, answers: list[Answer]) -> str:
    """Return "packs", "shares", "padded, because ...", "refused, because ...", "WRONG ..." or "TRACEBACK ..."."""
    found = {answer.question: answer for answer in answers}
    if refused(answers):
        return f"refused, because {refused(answers)}"
    if not subject.is_causal:
        return f"WRONG not causal (later tokens move earlier ones by {subject.looks_ahead:.1g}) and not refused"
    bad = [answer for answer in answers if answer.verdict in (WRONG, TRACEBACK)]
    if bad:
        kind = WRONG if any(answer.verdict == WRONG for answer in bad) else TRACEBACK
        return f"{kind.upper()} " + "; ".join(map(_in_words, bad))
    if found["rows.packed"].verdict == REFUSED:
        return f"padded, because {found['rows.packed'].said}"
    return "packs" if found["rows.shared"].verdict == REFUSED else "shares"


def _in_words(answer: Answer) -> str:
    size = "" if answer.difference is None else f" by {answer.difference:.2g}"
    return f"{answer.question}{size} {answer.said}".strip()
