"""Evaluates a reward model, ours or another's, on preference data; or scores the pairs of a file.

    python -m training.step2_reward.evaluate --model_name_or_path MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
    python -m training.step2_reward.evaluate --model_name_or_path MODEL --score_file pairs.jsonl --output scores.jsonl

The first takes the rows that step 2 evaluates on (--split train: those that it trains on), prints the report and
writes OUT/evaluation.json. For every row of a file: --split train --data_split 0,1,0 --eval_fraction 0. The second
prints one line a pair. Several ranks: python -m training.utils.run.launch training.step2_reward.evaluate ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from training.utils.data.arguments import DataArguments
from training.utils.engine.arguments import DTYPE_NAMES, EngineArguments, check_engine_choices
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import Mistakes, ThreestepError
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.step2_reward.evaluation import ScoredResponses
    from training.utils.data.phases import ResponsesRow
    from training.utils.engine.startup import Ranks

SPLITS = ("eval", "train")


@dataclass
class EvaluateArguments:
    """What is evaluated, and how."""

    model_name_or_path: str = field(
        default="", metadata={"help": "Folder or hub name of a sequence-classification model with one label."}
    )
    split: str = field(default="eval", metadata={"help": "Rows of phase 2: eval, or train."})
    score_file: str | None = field(
        default=None,
        metadata={"help": "Score the pairs of this JSON-lines file (--prompt_column and so on) instead of a dataset."},
    )
    output: str | None = field(
        default=None, metadata={"help": "With --score_file: write one JSON object a pair to this file too."}
    )
    dtype: str = field(
        default="fp32",
        metadata={"help": f"One of {', '.join(DTYPE_NAMES)}; bf16 rounds scores so far that some become equal."},
    )
    zero_stage: int = field(default=0, metadata={"help": "3 shards the model over the ranks."})
    per_device_eval_batch_size: int = field(
        default=EngineArguments.per_device_eval_batch_size,
        metadata={"help": "Prompts of one forward of one rank; packed, as many tokens."},
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None, metadata={"help": "Most tokens in one forward, padding included; default: no bound."}
    )
    padded: bool = field(default=False, metadata={"help": "One sequence a row, padded."})

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.model_name_or_path), "--model_name_or_path expects a model folder or hub name, got nothing"
        )
        mistakes.require_one_of("--split", self.split, SPLITS)
        if self.score_file is not None and not os.path.isfile(self.score_file):
            mistakes.add(f"--score_file: there is no file '{self.score_file}'")
        mistakes.require(
            self.output is None or self.score_file is not None,
            "--output is for the scores of --score_file, and none is given; an evaluation is written to --output_dir",
        )
        for flag in ("per_device_eval_batch_size", "max_tokens_per_micro_batch"):
            got = getattr(self, flag)
            mistakes.require(got is None or got >= 1, f"--{flag} expects a whole number from 1 up, got {got}")
        check_engine_choices(mistakes, self.dtype, {"--zero_stage": self.zero_stage}, offload=False)


GROUPS = (RunArguments, DataArguments, EvaluateArguments)


def main(argv: Sequence[str]) -> None:
    """Parse, take the rows, load the model, score, report."""
    run, data, how = parse_arguments(GROUPS, argv, __doc__ or "")

    from training.step2_reward.evaluation import evaluate
    from training.step2_reward.pair_file import read_pairs, write_scores
    from training.step2_reward.report import report_text
    from training.utils.data.build import build_phase
    from training.utils.engine.startup import started_process_group
    from training.utils.models.loading import load_tokenizer
    from training.utils.run.metrics import say
    from training.utils.run.run_folder import RunFolder

    with started_process_group() as ranks:
        tokenizer = load_tokenizer(how.model_name_or_path, end_may_pad=True)
        if how.score_file is not None:
            pairs = read_pairs(how.score_file, data, tokenizer)
            score = load_scorer(how, data, tokenizer, ranks)
            write_scores(pairs, score(pairs.rows), how.output, ranks.is_main)
            return
        phase = build_phase(2, data, tokenizer, run.seed, ranks.is_main, say)
        rows = {"eval": phase.eval, "train": phase.train}[how.split]
        if len(rows) == 0:
            raise ThreestepError(
                f"--split {how.split} has no rows: raise --eval_fraction (it is {data.eval_fraction:g}), or evaluate "
                "--split train"
            )
        score = load_scorer(how, data, tokenizer, ranks)
        evaluation = evaluate(score(rows))
        say(report_text(evaluation), ranks.is_main)
        folder = RunFolder(run.output_dir, ranks.is_main)
        asked = {"model": how.model_name_or_path, "data_path": data.data_path, "split": how.split}
        folder.write_json("evaluation.json", {**asked, **asdict(evaluation)})
        say(f"written to {folder.path / 'evaluation.json'}", ranks.is_main)


def load_scorer(
    how: EvaluateArguments, data: DataArguments, tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> Callable[[Sequence[ResponsesRow]], ScoredResponses]:
    """Load the model; return what scores rows with it as plain transformers does."""
    from training.step2_reward.scoring import score_responses, without_end
    from training.utils.data.tokenize import end_of_conversation_id
    from training.utils.engine.frozen import FrozenModel
    from training.utils.engine.settings import EngineSettings
    from training.utils.engine.setup import load_under
    from training.utils.models.attention import plan_for
    from training.utils.models.layout_check import why_not_packed
    from training.utils.models.loading import check_positions, load_config, load_scalar_model
    from training.utils.models.settings import ModelSettings
    from training.utils.models.token_model import ScalarModel
    from training.utils.run.metrics import say

    settings = EngineSettings(dtype=how.dtype, zero_stage=how.zero_stage)
    check_positions(ModelSettings(how.model_name_or_path), data.max_seq_len, "--max_seq_len")
    own_pad_token_id = load_config(how.model_name_or_path).get_text_config().pad_token_id
    model = load_under(
        settings,
        ranks,
        lambda dtype: load_scalar_model(ModelSettings(how.model_name_or_path), dtype, tokenizer, must_have_head=True),
    )
    read = FrozenModel(ScalarModel(model), settings, ranks)
    reason = None if how.padded else why_not_packed(model, read, data.max_seq_len, ranks.device)
    if reason is not None:
        say(f"warning: {type(model).__name__} is read on padded rows: {reason}", ranks.is_main)
    plan = plan_for(
        model,
        sequences=how.per_device_eval_batch_size,
        longest_tokens=data.max_seq_len,
        packed=not how.padded and reason is None,
        ranks=ranks.world_size,
        max_tokens_per_micro_batch=how.max_tokens_per_micro_batch,
    )
    # Plain transformers reads a score at the last token that is not the pad token, and so its trainers have trained it:
    # where pad ends a response, the end token is not seen.
    end_token_id = end_of_conversation_id(tokenizer, data.end_of_conversation_token)

    def score(rows: Sequence[ResponsesRow]) -> ScoredResponses:
        rows = [without_end(row, end_token_id) for row in rows] if own_pad_token_id == end_token_id else rows
        return score_responses(read, rows, plan, tokenizer.pad_token_id, ranks)

    return score


if __name__ == "__main__":
    run_program(main)
