"""Parallel thinking as a form of texts (`contracts.drawing`): the ids of the tags, what happens to malformed blocks,
and the drawing of paths.

Rows keep flat ids; they are laid out at collation, by `layout`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.parallel_thinking.arguments import ParallelTagArguments, PathFlags
from training.utils.base.errors import ThreestepError
from training.utils.contracts.drawing import FormReader, OpenedForm, TextForm

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from threestep.plugins.parallel_thinking.layout import Block, ParallelTags, PathSampling
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.flags.added import AddedFlags


def parallel_form(added: AddedFlags) -> ParallelThinking | None:
    """Return the form that --parallel_thinking asks for; None without it."""
    flags = added.of(ParallelTagArguments)
    return ParallelThinking(flags) if flags.parallel_thinking else None


class ParallelThinking(TextForm):
    """Blocks of paths side by side."""

    flag = "--parallel_thinking"
    draws = "generates its paths side by side"
    beside_media = "can branch only from text-only prompts"

    def __init__(self, flags: ParallelTagArguments) -> None:
        self._flags = flags
        self.tokens = flags.parallel_tags
        in_words = f"the parallel-thinking tags are {' '.join(flags.parallel_tags)} (parallel_tags)"
        self.hints: Mapping[str, str] = {"malformed_parallel": in_words}
        if isinstance(flags, PathFlags):
            self.rows = flags.paths_of_a_block

    def check(self, data: Any, mistakes: Mistakes) -> None:
        mistakes.require(
            data.rows.loss_on != "conversation",
            "--parallel_thinking expects --loss_on response, got conversation: tags count only where the loss falls, "
            "because a prompt may quote them; change one of them",
        )

    def check_model(self, model: PreTrainedModel, masks_are_ours: bool) -> None:
        from threestep.plugins.parallel_thinking.drawing import check_paths

        check_paths(model, masks_are_ours)

    def opened(self, tokenizer: Any) -> ParallelPaths:
        from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling
        from training.utils.data.rows.tokenize import token_id

        ids, flags = [], self._flags
        for tag in flags.parallel_tags:
            index = token_id(tokenizer, tag)
            inside_text = tokenizer(f"a{tag}b", add_special_tokens=False)["input_ids"]
            if index is None or index not in inside_text:
                raise ThreestepError(
                    f"--parallel_tags expects every tag to be a single token, but '{tag}' is not; add it to the "
                    "tokenizer, as steps 1 and 2 do with --parallel_thinking"
                )
            ids.append(index)
        most = flags.max_path_tokens if isinstance(flags, PathFlags) else None
        malformed = getattr(flags, "malformed_parallel", ParallelPaths.malformed)
        paths = PathSampling(ParallelTags(*ids), self.rows, most)
        return ParallelPaths(paths, tuple(flags.parallel_tags), malformed)


@dataclass(frozen=True)
class ParallelPaths(OpenedForm):
    """Blocks of paths in the tokens of a tokenizer. words: the tags. malformed: what --malformed_parallel says."""

    paths: PathSampling
    words: tuple[str, ...] = ()
    malformed: str = "error"

    @property
    def layout(self) -> ParallelTags:
        return self.paths.tags

    @property
    def parts(self) -> dict[str, str]:
        return {
            "parallel_thinking": json.dumps([[*self.words], asdict(self.paths.tags)]),
            "malformed_parallel": self.malformed,
        }

    @property
    def decides(self) -> dict[str, Any]:
        return {"paths": asdict(self.paths)}

    def reader(self, counts: Counter[str]) -> ParallelCheck:
        return ParallelCheck(self, counts)

    def draw(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        from threestep.plugins.parallel_thinking.drawing import drawn_side_by_side

        return drawn_side_by_side(model, request, self.paths)

    def parts_of(self, response_ids_r: torch.Tensor) -> tuple[int, ...]:
        from threestep.plugins.parallel_thinking.layout import drawn_blocks

        return tuple(len(block.paths) for block in drawn_blocks(response_ids_r, self.layout))


class ParallelCheck(FormReader):
    """Finds blocks in responses before truncation. counts: gains the rows `with blocks` and `malformed and causal`."""

    def __init__(self, form: ParallelPaths, counts: Counter[str]) -> None:
        self._form, self._counts = form, counts

    def form_of(
        self, texts: Sequence[Sequence[int]], where: str, loss: Sequence[bool] | None = None
    ) -> ParallelTags | None:
        """The tags where the row has blocks to lay out, otherwise None.

        A malformed block raises ThreestepError with `--malformed_parallel error`, Dropped with `drop`, and gives None
        with `causal`.
        """
        from threestep.plugins.parallel_thinking.layout import MalformedBlocks
        from training.utils.data.rows.tokenize import Dropped

        try:
            has_blocks = any([self._blocks(ids, loss) for ids in texts])
        except MalformedBlocks as problem:
            if self._form.malformed == "error":
                raise ThreestepError(
                    f"{where}: the parallel-thinking tags ({' '.join(self._form.words)}) do not match in the "
                    f"response: {problem}; correct the row, or set --malformed_parallel to drop or causal"
                ) from None
            if self._form.malformed == "drop":
                raise Dropped("malformed_parallel") from None
            self._counts["malformed and causal"] += 1
            return None
        self._counts["with blocks"] += has_blocks
        return self._form.layout if has_blocks else None

    def check_cut(
        self, texts: Sequence[Sequence[int]], loss: Sequence[bool] | None = None, may_end_open: bool = False
    ) -> None:
        """Leave a row out whose blocks truncation did not leave whole: of a ranked response the end token would be in a
        path, and the score that path's alone."""
        from threestep.plugins.parallel_thinking.layout import MalformedBlocks
        from training.utils.data.rows.tokenize import Dropped

        try:
            for ids in texts:
                self._blocks(ids, loss, may_end_open)
        except MalformedBlocks:
            raise Dropped("cut_inside_a_block") from None

    def _blocks(self, ids: Sequence[int], loss: Sequence[bool] | None, cut: bool = False) -> tuple[Block, ...]:
        import torch

        from threestep.plugins.parallel_thinking.layout import find_blocks, written_tokens

        written = None if loss is None else written_tokens(torch.tensor(loss, dtype=torch.bool))
        return find_blocks(torch.tensor(ids, dtype=torch.int64), self._form.layout, written, cut)
