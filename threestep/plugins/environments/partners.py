"""Environments and tools of a program's flags, as those who answer its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from threestep.plugins.environments.arguments import EnvironmentArguments, OpeningRowArguments
from threestep.plugins.environments.conversation_arguments import ConversationArguments
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import json_object
from training.utils.generation.partners import Partner, Partners

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from threestep.plugins.environments.loading import Environments
    from threestep.plugins.environments.turns.conversations import ActingRollout
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.rollout_engine import Drawing, RolloutEngine
    from training.utils.contracts.rows import PromptRow
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.data.rows.dataset import CachedSplit
    from training.utils.flags.added import AddedFlags


class EnvironmentPartners(Partners):
    """The environments of --environment and --tools."""

    flag = "--environment, --tools"

    def __init__(self, flags: AddedFlags) -> None:
        self._flags, self._limits = flags.of(EnvironmentArguments), flags.of(ConversationArguments)
        self._row = flags.of(OpeningRowArguments).row
        self._environments: Environments | None = None
        self.is_there = self._flags.is_on
        self.gives_rewards = self._flags.environment is not None

    @property
    def columns(self) -> dict[str, Any]:  # type: ignore[override]  # read where a chat begins
        return json_object(self._row or "{}", "--row")

    @property
    def environments(self) -> Environments | None:
        """The environments by name; None before they are loaded."""
        return self._environments

    @property
    def drawing(self) -> Drawing:
        from threestep.plugins.environments.turns.kept_turns import TurnsKept
        from training.utils.contracts.rollout_engine import Drawing

        return Drawing(turns=TurnsKept())

    @property
    def engine_flags(self) -> dict[str, Any]:
        return {"environment": self._flags.environment or self._flags.tools}

    @property
    def decides(self) -> dict[str, Any]:
        given = {**asdict(self._flags), **asdict(self._limits)} if self.is_there else {}
        return {name: value for name, value in given.items() if name != "answer_interval"}  # which decides rounding

    def check(self, mistakes: Mistakes) -> None:
        mistakes.require(
            self.gives_rewards or self._row is None,
            f"--row {self._row} opens an environment, but none is given; pass --environment, or remove --row",
        )
        self._limits.require_partner(self.is_there, mistakes)

    def load(self, mistakes: Mistakes) -> None:
        from threestep.plugins.environments.loading import load_environments

        self._environments = load_environments(self._flags, mistakes)

    def check_rows(self, rows: CachedSplit) -> None:
        """ThreestepError for the first row whose column `environment` names none of the environments, or lacks one."""
        from threestep.plugins.environments.loading import COLUMN

        environments = self._environments
        if environments is None or environments.answers_any_row:
            return
        seen = set[str]()
        for place, columns in enumerate(rows.values("columns")):
            name = repr(columns.get(COLUMN, environments))
            if name not in seen:
                environments.name_of(_as_row(rows[place]))
                seen.add(name)

    def acting(
        self,
        engine: RolloutEngine,
        chat: ChatArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_ids: Sequence[int],
        prompt_tokens: int,
        partner_of: Callable[[Any, int], Partner | None] | None = None,
    ) -> ActingRollout:
        from threestep.plugins.environments.acting import ActingSettings, acting_engine

        settings = ActingSettings(chat, self._flags, self._limits, prompt_tokens)
        found = partner_of or (lambda row, seed: self.partner(_as_row(row), seed))
        return acting_engine(engine, found, settings, tokenizer, end_token_ids=end_token_ids)

    def partner(self, row: Mapping[str, Any], seed: int) -> Partner | None:
        if self._environments is None:
            raise ThreestepError(
                f"{self.flag}: a conversation was opened before the environments were loaded; load them first"
            )
        return self._environments.episode(row, seed)

    def remembered(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from threestep.plugins.environments.turns.turn_tokens import BY_ENVIRONMENT

        return {**message, BY_ENVIRONMENT: True}

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()


def _as_row(row: PromptRow) -> dict[str, Any]:
    """The row that an environment's `reset` receives."""
    fixed = {"messages": row.columns["raw_prompt"], "prompt": row.prompt_text, "ground_truth": row.reference}
    return {**row.columns, **fixed}
