"""Generative reward models, and others behind HTTP, on a benchmark: `--model_name_or_path judge:FILE.yaml`, `http:URL`.

A pointwise judge rates each response. A pairwise one gives each response its mean share of wins over the others of its
row, each pair asked in both orders: of two responses, the better one has the higher share. Equal responses to a row are
asked about once. The authors' code counts a reply that it cannot read as a guess (0.5, or 0.25 of four) or as a rating
of -1; here it is asked again, and then ends the run, which resumes from its log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.rewards.calling import MESSAGES
from training.utils.rewards.table import GROUPS, OpenedRule, kind_of
from training.utils.rewards.weighted import rule_named

if TYPE_CHECKING:
    from threestep.plugins.evaluation.reward_benchmarks.reading import Question
    from training.utils.rewards.arguments import ScoringArguments


def asks(path: str) -> bool:
    """True for a model that is asked, and not loaded."""
    return kind_of(path) is not None


def asked_model(path: str, flags: ScoringArguments) -> OpenedRule:
    """Return the judge or the server. ThreestepError for mistakes in its settings, and for what a benchmark lacks."""
    model = rule_named(path, flags, "--model_name_or_path")
    assert isinstance(model, OpenedRule)
    if model.reads_reference:
        raise ThreestepError(
            f"--model_name_or_path {path} shows the judge a row's ground_truth, which benchmarks lack; remove "
            "with_reference and against from that file"
        )
    return model


def asked_scores(model: OpenedRule, questions: Sequence[Question]) -> list[list[float]]:
    """Return the scores of each question's responses."""
    prompts = [question.prompt for question in questions for _ in question.responses]
    responses = [text for question in questions for text in question.responses]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = [row for row, question in enumerate(questions) for _ in question.responses]
    found: list[Any] = list(model(prompts, responses, **{MESSAGES: messages, GROUPS: rows}))
    scores, first = list[list[float]](), 0
    for question in questions:
        scores.append(found[first : first + len(question.responses)])
        first += len(question.responses)
    return scores
