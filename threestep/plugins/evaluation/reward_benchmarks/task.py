"""`evaluate reward_model`: a reward model on a published benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.answers import batches_of
from threestep.plugins.evaluation.arguments import BENCHMARKS, EvaluateArguments
from threestep.plugins.evaluation.model import start_alone
from threestep.plugins.evaluation.reward_benchmarks.reading import Question, counts_that_differ, read_questions
from threestep.plugins.evaluation.reward_benchmarks.scores import (
    BenchmarkScore,
    ScoredRow,
    best_result,
    pair_result,
    rewardbench2_scores,
    rewardbench_scores,
)
from threestep.plugins.evaluation.reward_benchmarks.services import asked_model, asked_scores, asks
from threestep.plugins.evaluation.scorer import Scorer, load_answer_scorer
from threestep.plugins.evaluation.sharing import Sharers, sharers
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.storage import replace_file
from training.utils.loading.configurations import load_config, positions_of
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.rewards.table import RunPlace, open_rules
from training.utils.run.progress import progress_bar
from training.utils.run.run_folder import RunFolder, check_place

if TYPE_CHECKING:
    from threestep.plugins.evaluation.opening import Evaluated

ScoreQuestions = Callable[[Sequence[Question]], list[tuple[list[float], int]]]
TASK = "reward_model"
_MOST_TOKENS = 2048  # of a prompt with a response, as in the authors' runs; the rest is cut from the right
SCORED: dict[str, tuple[Callable[..., dict[str, BenchmarkScore]], Callable[[Sequence[float]], float]]] = {
    "rewardbench2": (rewardbench2_scores, best_result),
    "rewardbench": (rewardbench_scores, pair_result),
}  # by name: the figures of all rows, and the result of one


def run_benchmark(flags: Evaluated) -> list[str]:
    """Score the responses of a benchmark, write figures and rows, and return the lines to print. Ranks take prompts in
    turns; those other than the first return no line."""
    _check(flags)
    for ending in ("json", "jsonl"):
        check_place("--output_dir", Path(flags.run.output_dir) / f"{TASK}.{ending}")
    path = flags.evaluation.model_name_or_path
    if asks(path):
        asked_model(path, flags.reward)  # its mistakes, before the files are read
    else:
        check_model_folder(path)
    with sharers() as together:
        return _run(flags, together)


def _check(flags: Evaluated) -> None:
    """ThreestepError for flags that a benchmark does not take."""
    mistakes = Mistakes()
    mistakes.require(
        flags.evaluation.benchmark is not None,
        f"reward_model expects --benchmark with one of {', '.join(BENCHMARKS)}, got none; for your own pairs, use "
        "threestep evaluate pairs",
    )
    for group, why in (
        (flags.data.split, "a benchmark uses all rows of its files"),
        (flags.reward, "the model to evaluate is --model_name_or_path"),
    ):
        for each in fields(group):
            given = getattr(group, each.name)
            if each.name == "reward_replay" and asks(flags.evaluation.model_name_or_path):
                continue
            mistakes.require(given == each.default, f"--{each.name} {given} is not used here: {why}; remove it")
    for name in ("baseline", "reward_model", "val_samples"):
        given, default = getattr(flags.evaluation, name), EvaluateArguments.__dataclass_fields__[name].default
        mistakes.require(given == default, f"--{name} {given} is not used here: no responses are generated; remove it")
    mistakes.raise_if_any()


def _run(flags: Evaluated, together: Sharers) -> list[str]:
    benchmark, path = flags.evaluation.benchmark, flags.evaluation.model_name_or_path
    assert benchmark is not None, "checked with the flags"
    questions = read_questions(benchmark, flags.data.source.data_path)
    if together.is_main:
        for sentence in counts_that_differ(benchmark, questions):
            note(f"warning: {sentence}")
    scores_of, most = _asked_scores(flags, path, together) if asks(path) else _model_scores(flags, path)
    batches = batches_of(len(questions), flags.evaluation.per_device_eval_batch_size)
    mine = sum(len(batches[piece]) for piece in together.pieces(len(batches)))
    with progress_bar(mine, f"scores of {path}", together.is_main, "prompt", on_terminal_only=True) as bar:

        def scored(piece: int) -> list[tuple[list[float], int]]:
            found = scores_of([questions[place] for place in batches[piece]])
            bar.update(len(batches[piece]))
            return found

        results = [row for batch in together.results(TASK, len(batches), scored) for row in batch]
    return _write(flags, questions, results, most) if together.is_main else []


def _model_scores(flags: Evaluated, path: str) -> tuple[ScoreQuestions, int]:
    """Return the scores of a reward model, and the tokens that it reads."""
    scorer = load_answer_scorer(path, flags.sampling.dtype, flags.data, start_alone())
    most = min(_MOST_TOKENS, positions_of(load_config(path)) or _MOST_TOKENS)
    return lambda questions: _scores(scorer, questions, most), most


def _asked_scores(flags: Evaluated, path: str, together: Sharers) -> tuple[ScoreQuestions, int]:
    """Return the verdicts of a judge or a server, which cut nothing here."""
    model = asked_model(path, flags.reward)
    place = RunPlace(Path(flags.run.output_dir), together.rank, together.world_size)
    open_rules([model], flags.reward.reward_replay, place)

    def scores_of(questions: Sequence[Question]) -> list[tuple[list[float], int]]:
        return [(scores, 0) for scores in asked_scores(model, questions)]

    return scores_of, 0


def _scores(scorer: Scorer, questions: Sequence[Question], most: int) -> list[tuple[list[float], int]]:
    """The scores of each question's responses, and how many of these were cut at `most` tokens. Equal tokens are scored
    once: rounding must not break a tie."""
    own, places, cut = list[list[tuple[int, ...]]](), dict[tuple[int, ...], int](), []
    for question in questions:
        messages = [{"role": "user", "content": question.prompt}]
        pairs = [scorer.ids_of_text(messages, text) for text in question.responses]
        cut.append(sum(len(prompt) + len(response) > most for prompt, response in pairs))
        own.append([(*prompt, *response)[:most] for prompt, response in pairs])
        for (prompt, _), ids in zip(pairs, own[-1], strict=True):
            places.setdefault(ids, min(len(prompt), len(ids) - 1))  # its last token is scored, whatever it belongs to
    prompts = [list(ids[:begin]) for ids, begin in places.items()]
    scores = scorer.score_ids(prompts, [list(ids[begin:]) for ids, begin in places.items()])
    score_of = dict(zip(places, scores, strict=True))
    found = []
    for question, texts, count in zip(questions, own, cut, strict=True):
        numbers = [score_of[ids] for ids in texts]
        if not all(map(math.isfinite, numbers)):
            raise ThreestepError(f"the row '{question.row_id}': expected finite scores, got {numbers}")
        found.append((numbers, count))
    return found


def _write(
    flags: Evaluated, questions: Sequence[Question], results: Sequence[tuple[list[float], int]], most: int
) -> list[str]:
    """Write reward_model.json and reward_model.jsonl, and return the lines to print."""
    benchmark, folder = flags.evaluation.benchmark or "", Path(flags.run.output_dir)
    figures_of, result_of = SCORED[benchmark]
    rows = [
        ScoredRow(question.subset, scores, question.right, question.row_id)
        for question, (scores, _) in zip(questions, results, strict=True)
    ]
    figures = {name: score.figure for name, score in figures_of(rows, flags.run.seed).items()}
    cut = sum(count for _, count in results)
    settings: dict[str, Any] = {"task": TASK, "benchmark": benchmark, "model": flags.evaluation.model_name_or_path}
    settings |= {"data_path": flags.data.source.data_path, "dtype": flags.sampling.dtype, "seed": flags.run.seed}
    counts = {"rows": len(rows)} | ({"responses_cut": cut, "most_tokens": most} if most else {})
    shown = {name: asdict(figure) for name, figure in figures.items()}
    RunFolder(folder, is_main_rank=True).write_json(f"{TASK}.json", {**settings, **counts, "figures": shown})
    lines = [
        {"id": row.row_id, "subset": row.subset, "right": row.right, "scores": list(row.scores)}
        | ({"result": result_of(row.scores)} if row.right == 1 else {})
        for row in rows
    ]
    replace_file(folder / f"{TASK}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    said = [f"{name:<24} {figure}" for name, figure in {"rows": f"{len(rows):,}", **figures}.items()]
    if cut:
        said.append(f"{cut:,} responses were cut so that prompt and response fit in {most:,} tokens")
    return [*said, f"written to {folder}: {TASK}.json, {TASK}.jsonl"]
