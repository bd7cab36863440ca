"""Best of n from its flags: draw and score batch by batch, keep each; then rows, curve and page.

A prompt with its responses is one object: prompt (text or messages), ground_truth, data_source, prompt_index, uid, and
lists with a value for each response: responses, ended, tokens, reward, reward/NAME of each summand, check.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.answers import Scores, batches_of, check_rewards, drawn_batch, scores_of
from threestep.plugins.evaluation.best_of.arguments import BestOfArguments
from threestep.plugins.evaluation.best_of.curve import CHECK, REWARD
from threestep.plugins.evaluation.best_of.results import write_results
from threestep.plugins.evaluation.best_of.store import AnswerStore, Drawn
from threestep.plugins.evaluation.model import Answer, ChatFolder, ChatModel, check_room, start_alone
from threestep.plugins.evaluation.opening import (
    Evaluated,
    built_rows,
    engine_of,
    folder_of,
    load,
    open_rewards,
    scored_by,
)
from threestep.plugins.evaluation.scorer import Scorer, load_answer_scorer
from threestep.plugins.evaluation.sharing import Sharers, sharers
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.storage import sha256_of_object
from training.utils.checkpoints.other_runs import only_run
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.files.digests import digest_files
from training.utils.data.rows.arguments import HUMAN_ASSISTANT
from training.utils.loading.configurations import model_files
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.rewards.calling import MESSAGES
from training.utils.rewards.weighted import Reward, check_comparisons, reads_model, rule_named
from training.utils.run.progress import progress_bar

if TYPE_CHECKING:
    from training.utils.contracts.rows import PromptRow

_CHECKED_PROMPTS = 64  # read back before anything is drawn


def run_best_of(flags: Evaluated, wanted: BestOfArguments, settings: dict[str, Any]) -> list[str]:
    """Draw what is not there yet, write all results, and return the lines to print; none on ranks other than the first.

    settings: those that the responses depend on.
    """
    rewards, checker = _checked(flags, wanted)
    models = [path for path in (wanted.model_name_or_path, wanted.reward_model) if path is not None]
    for path in models:
        check_model_folder(path)
    start_engine = engine_of(flags)
    with sharers() as together, contextlib.ExitStack() as held:
        if together.is_main:
            held.enter_context(only_run(flags.run.output_dir))
        folder = replace(folder_of(flags, wanted.model_name_or_path), reader=None)
        unread = "threestep evaluate best_of supports only text"
        rows = _part(built_rows(flags, "prompts", folder, with_messages=True, unread=unread).rows, wanted)
        _check_prompts(folder, rows)
        check_rewards((*rewards, *checker), rows)
        store, batches = (
            AnswerStore(Path(flags.run.output_dir)),
            batches_of(len(rows), wanted.per_device_eval_batch_size),
        )

        def begin() -> list[int]:
            prompts = sha256_of_object({"uids": [row.uid for row in rows]})
            digests = {
                f"the files of {path}": digest_files(model_files(path), flags.data.cache.cache_dir)
                for path in models
                if os.path.isdir(path)
            }
            store.begin({**settings, "the prompts": prompts, **digests}, wanted.overwrite)
            return store.missing(batches)

        missing = together.from_main("missing", begin)
        if missing:
            model, scorer = load(flags, folder, start_engine, None), None
            if reads_model(rewards):
                assert wanted.reward_model is not None, "checked with the flags"
                scorer = load_answer_scorer(wanted.reward_model, flags.sampling.dtype, flags.data, start_alone())
            open_rewards(flags, (*rewards, *checker), folder, together)
            drawing = _BatchDrawing(flags, model, (*rewards, *checker), scorer)
            _draw(drawing, rows, [(number, batches[number]) for number in missing], store, together=together)
        return write_results(store.close(batches), flags, wanted) if together.is_main else []


def _checked(flags: Evaluated, wanted: BestOfArguments) -> tuple[tuple[Reward, ...], tuple[Reward, ...]]:
    """Return the rewards, and the checker as one of weight 0 if there is one; ThreestepError, before a model loads, for
    flags that do not go together."""
    mistakes = Mistakes()
    rewards, checker = scored_by(flags, mistakes), None
    if wanted.checker is not None:
        checker = mistakes.note(rule_named, wanted.checker, flags.reward, "--checker")
    mistakes.require(
        wanted.num_samples_per_prompt == 1 or flags.sampling.temperature > 0,
        f"--num_samples_per_prompt {wanted.num_samples_per_prompt} generates several responses, but --temperature 0 "
        "makes them identical; raise --temperature",
    )
    count = wanted.num_samples_per_prompt
    check_comparisons(rewards, {f"--num_samples_per_prompt {count}": count}, mistakes)
    mistakes.require(
        wanted.reward_model is None or reads_model(rewards),
        f"--reward_model {wanted.reward_model} is for `model` in --reward, but --reward is {flags.reward.reward}; add "
        "model to it, or remove --reward_model",
    )
    mistakes.raise_if_any()
    return rewards, () if checker is None else (Reward(CHECK, 0.0, checker),)


def _part(rows: Sequence[PromptRow], wanted: BestOfArguments) -> Sequence[PromptRow]:
    """The prompts of --part."""
    if wanted.part == BestOfArguments.part:
        return rows
    places = wanted.places(len(rows))
    if not places:
        raise ThreestepError(
            f"--part {wanted.part} is empty, because there are only {len(rows)} prompts; use fewer parts"
        )
    return [rows[place] for place in places]


def _check_prompts(folder: ChatFolder, rows: Sequence[PromptRow]) -> None:
    """ThreestepError if a prompt that is kept as a row would be read as other tokens than those that are answered."""
    maker = PromptMaker(folder.data, folder.tokenizer)
    for place in range(min(len(rows), _CHECKED_PROMPTS)):
        row = rows[place]
        read = maker.make(_prompt_of(row), row.reference, row.row_id)
        if read is None or read.flipped_prompt_ids.tolist() != row.flipped_prompt_ids.tolist():
            raise ThreestepError(
                f"the prompt of row id {row.row_id} cannot be saved as a row, because it depends on more than its text "
                "or messages (for example tools or a custom class); use prompts that are only text or messages"
            )


def _prompt_of(row: PromptRow) -> Any:
    """Messages where the data have them, else text."""
    return row.columns.get(MESSAGES, row.prompt_text)


@dataclass(frozen=True)
class _BatchDrawing:
    """The models of a run, which draw and score a batch. scorer: required if one of the rewards is the model."""

    flags: Evaluated
    model: ChatModel
    rewards: Sequence[Reward]
    scorer: Scorer | None

    def batch(self, rows: Sequence[PromptRow], places: range) -> list[Drawn]:
        """The rows at `places` with their responses and scores. Each batch is drawn and scored for itself, so that it
        has the same bits in any run."""
        flags, model = self.flags, self.model
        longest = model.data.rows.max_prompt_seq_len + flags.sampling.max_new_tokens
        check_room(model, longest, "--max_prompt_seq_len and --max_new_tokens")
        each, own, sampling = flags.evaluation.val_samples, [rows[place] for place in places], flags.sampling
        answers = drawn_batch(model, rows, places, model.sampling(sampling), seed=flags.run.seed, samples=each)
        scores = scores_of(model, own, answers, self.rewards, scorer=self.scorer, flags=flags.reward)
        spaced = model.data.chat.prompt_style == HUMAN_ASSISTANT
        found = []
        for index, (place, row) in enumerate(zip(places, own, strict=True)):
            part = slice(index * each, (index + 1) * each)
            found.append(
                {
                    "prompt_index": place,
                    "uid": row.uid,
                    "prompt": _prompt_of(row),
                    "ground_truth": row.reference,
                    "data_source": row.columns.get("data_source"),
                    "responses": [_response(answer, row, spaced) for answer in answers[part]],
                    "ended": [answer.ended for answer in answers[part]],
                    "tokens": [len(answer.token_ids) for answer in answers[part]],
                    **_values(scores, part, row),
                }
            )
        return found


def _response(answer: Answer, row: PromptRow, spaced: bool) -> str:
    """The text; as a message, without the spaces around it that belong to "Human: ... Assistant:" (`spaced`)."""
    return answer.text.strip() if spaced and MESSAGES in row.columns else answer.text


def _values(scores: Scores, part: slice, row: PromptRow) -> dict[str, list[float]]:
    """The values of a prompt's responses, by name. ThreestepError if a reward is not finite."""
    values = {REWARD: scores.total[part]}
    for name, numbers in scores.parts.items():
        is_check = name == CHECK or name.startswith(f"{CHECK}/")
        values[name if is_check else f"{REWARD}/{name}"] = numbers[part]
    if not all(map(math.isfinite, values[REWARD])):
        raise ThreestepError(f"the prompt of row id {row.row_id}: expected finite rewards, got {values[REWARD]}")
    return values


def _draw(
    drawing: _BatchDrawing,
    rows: Sequence[PromptRow],
    missing: Sequence[tuple[int, range]],
    store: AnswerStore,
    *,
    together: Sharers,
) -> None:
    """Draw the missing batches, which the ranks take in turns, and keep each as soon as it is scored."""
    mine = sum(len(missing[piece][1]) for piece in together.pieces(len(missing)))
    with progress_bar(mine, "responses", together.is_main, "prompt", on_terminal_only=True) as bar:

        def keep(piece: int) -> int:
            number, places = missing[piece]
            store.add(number, drawing.batch(rows, places))
            bar.update(len(places))
            return len(places)

        together.results("batches", len(missing), keep)
