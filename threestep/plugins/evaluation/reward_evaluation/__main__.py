"""Evaluates a reward model, from Threestep or elsewhere, on preference data, or scores the pairs in a file.

    threestep evaluate pairs --model_name_or_path MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
    threestep evaluate pairs --model_name_or_path MODEL --score_file pairs.jsonl --output scores.jsonl

The first command evaluates on the held-out rows of step 2 (with --split train, on its training rows), prints the report
and writes OUT/evaluation.json. To use every row of a file, add --split train --data_split 0,1,0 --eval_fraction 0. The
second command prints one line per pair. To use several ranks, add for example --num_ranks 2.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import PROMPT_FLAGS, OptionalDataArguments, ShownArguments
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag, flag_of, settings_of, without_flags
from training.utils.models.arguments import ModelArguments
from training.utils.plugins.registry import flag_names
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    from training.utils.contracts.media import SeenMedia
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.data.build.build import PhaseData
    from training.utils.preference.evaluation import ScoredResponses

SPLITS = ("eval", "train")

_EVALUATION = "evaluation.json"  # in OUTPUT_DIR
_EVERY_ROW = "--split train --data_split 0,1,0 --eval_fraction 0"


@dataclass
class RewardEvaluationArguments:
    """The reward model to evaluate, and its data."""

    topic: ClassVar[str] = "task"

    model_name_or_path: str = flag_of(
        ModelArguments,
        "Reward model: a folder or hub name of a sequence-classification model with one label (required).",
    )
    split: str = flag_of(ShownArguments, "Split of step 2's rows: eval or train.", default="eval", choices=SPLITS)
    score_file: str | None = flag(
        None,
        "Score the pairs in this JSON Lines file instead of a dataset; name its columns with --prompt_column, "
        "--chosen_column and --rejected_column.",
        "file",
    )
    output: str | None = flag(None, "With --score_file: also write one JSON object per pair to this file.", "file")
    dtype: str = flag_of(
        EngineArguments,
        "Precision; bf16 rounds so coarsely that some scores become equal.",
        default="fp32",
        topic="task",
    )
    zero_stage: int = flag_of(
        EngineArguments, "3 shards the model across the ranks; other stages have no effect.", topic="task"
    )
    per_device_eval_batch_size: int = flag_of(
        EngineArguments, "Prompts per forward pass on each rank.", topic="task", takes="prompts >= 1"
    )
    max_tokens_per_micro_batch: int | None = flag_of(EngineArguments, topic="task")
    padded: bool = flag_of(
        EngineArguments, "Put one padded sequence in each row instead of packing rows.", topic="task"
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.model_name_or_path), "--model_name_or_path expects a model folder or hub name, got nothing"
        )
        if self.score_file is not None and not os.path.isfile(self.score_file):
            mistakes.add(f"--score_file: there is no file '{self.score_file}'")
        mistakes.require(
            self.output is None or self.score_file is not None,
            "--output needs --score_file; without it, the evaluation is written to --output_dir",
        )


UNREAD = [f"--{name}" for name in PROMPT_FLAGS]  # of step 3: set aside, so that data flags can be shared
GROUPS = (RunArguments, without_flags(OptionalDataArguments, PROMPT_FLAGS), RewardEvaluationArguments)


def _check_places(run: RunArguments, flags: RewardEvaluationArguments) -> None:
    """ThreestepError if the results could not be written at the end."""
    if flags.output is not None:
        check_place("--output", flags.output)
    if flags.score_file is None:
        check_place("--output_dir", os.path.join(run.output_dir, _EVALUATION))


def _share(phase: PhaseData, split: str) -> str:
    """The share of the rows that was scored, and the flags that score all."""
    rows, total = len(getattr(phase, split)), len(phase.train) + len(phase.eval)
    remedy = f"; {_EVERY_ROW} scores every training row" if rows < total else ""
    return f"scored {rows:,} of {total:,} rows (--split {split}){remedy}"


def main(argv: Sequence[str]) -> None:
    """Parse, take the rows, load the model, score, report."""
    run, data, flags = parse_arguments(GROUPS, argv, __doc__ or "", flag_names("reward-evaluate"), unread=UNREAD)
    _check_places(run, flags)

    from threestep.plugins.evaluation.reward_evaluation.pair_file import read_pairs, write_scores
    from threestep.plugins.evaluation.reward_evaluation.report import report_text
    from threestep.plugins.evaluation.reward_evaluation.scorer import ScorerSettings, load_scorer
    from training.utils.base.console import log
    from training.utils.data.build.build import build_phase
    from training.utils.data.chat.style import adopt_style
    from training.utils.data.rows.documents import responses_document
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.loading.folder_kinds import check_model_folder
    from training.utils.loading.tokenizers import load_tokenizer
    from training.utils.preference.evaluation import evaluate
    from training.utils.run.run_folder import RunFolder
    from training.utils.setup.media import reader_of_folder, run_media, why_unread

    check_model_folder(flags.model_name_or_path)
    settings = settings_of(ScorerSettings, flags)
    with started_process_group() as ranks:
        tokenizer = load_tokenizer(flags.model_name_or_path, end_may_pad=True)
        log(adopt_style(tokenizer, data.chat).sentence, ranks.is_main)
        reader = reader_of_folder(flags.model_name_or_path, tokenizer)

        def scored(rows: Sequence[ResponsesRow], seen: SeenMedia | None) -> ScoredResponses:
            media = run_media(rows, seen, partial(responses_document, are_targets=True))
            return load_scorer(settings, data, tokenizer, ranks, media=media)(rows)

        if flags.score_file is not None:
            pairs = read_pairs(flags.score_file, data, tokenizer, reader)
            write_scores(pairs, scored(pairs.rows, pairs.seen), flags.output, ranks.is_main)
            return
        unread = why_unread(flags.model_name_or_path)
        phase = build_phase(
            "ranked", data, tokenizer, run.seed, is_main_rank=ranks.is_main, log=log, media=reader, unread=unread
        )
        rows = getattr(phase, flags.split)
        if len(rows) == 0:
            raise ThreestepError(
                f"--split {flags.split} has no rows; raise --eval_fraction (now {data.split.eval_fraction:g}), or "
                "use --split train"
            )
        evaluation = evaluate(scored(rows, phase.seen))
        log(f"{report_text(evaluation)}\n\n{_share(phase, flags.split)}", ranks.is_main)
        folder = RunFolder(run.output_dir, ranks.is_main)
        source = {"model": flags.model_name_or_path, "data_path": data.source.data_path, "split": flags.split}
        folder.write_json(_EVALUATION, {**source, **asdict(evaluation)})
        log(f"written to {folder.path / _EVALUATION}", ranks.is_main)


if __name__ == "__main__":
    run_program(main)
