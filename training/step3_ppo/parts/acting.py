"""Conversations of step 3: its rows open the environments of its flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from training.utils.environments.acting import ActingSettings, acting_engine
from training.utils.environments.loading import COLUMN, Environments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.contracts.rows import PromptRow
    from training.utils.data.rows.dataset import CachedSplit
    from training.utils.generation.conversations import ActingRollout


def engine_of_rows(
    engine: RolloutEngine,
    environments: Environments,
    flags: PpoFlags,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_token_ids: Sequence[int],
) -> ActingRollout:
    """Return the sampler of the rows' conversations on `engine` (see `acting_engine`)."""
    longest_prompt = flags.data.rows.max_prompt_seq_len
    settings = ActingSettings(flags.data.chat, flags.environment, flags.conversation, longest_prompt)

    return acting_engine(
        engine,
        lambda row, seed: environments.episode(_as_row(row), seed),
        settings,
        tokenizer,
        end_token_ids=end_token_ids,
    )


def check_rows(environments: Environments, split: CachedSplit) -> None:
    """ThreestepError for the first row whose column `environment` names none of the environments, or that lacks one."""
    if environments.answers_any_row:
        return
    seen = set[str]()
    for place, columns in enumerate(split.values("columns")):
        name = repr(columns.get(COLUMN, environments))
        if name not in seen:
            environments.name_of(_as_row(split[place]))
            seen.add(name)


def deciding_flags(flags: PpoFlags) -> dict[str, Any]:
    """The flags that conversations depend on, by name, none without environments; and whether experts are recorded, if
    they are."""
    given = {**asdict(flags.environment), **asdict(flags.conversation)} if flags.environment.is_on else {}
    if flags.guests.records_experts:
        given["experts"] = True
    return {name: value for name, value in given.items() if name != "answer_interval"}  # which decides their rounding


def _as_row(row: PromptRow) -> dict[str, Any]:
    """The row that an environment's `reset` receives."""
    fixed = {"messages": row.columns["raw_prompt"], "prompt": row.prompt_text, "ground_truth": row.reference}
    return {**row.columns, **fixed}
