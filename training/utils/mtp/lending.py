"""A trained head with whole weights on one rank, for rollouts.

Below ZeRO-3 that is the trained module itself. Under ZeRO-3 it is a copy on every rank, filled by gathering the weights
each time: a head is one block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.mtp.head import MtpHead


class WholeHead:
    """Lends the head that `engine` trains, in eval mode with whole weights."""

    def __init__(self, engine: TrainingEngine, make_empty: Callable[[], MtpHead]) -> None:
        """make_empty: makes a head of the same kind, with whole weights of any value."""
        self._engine, self._make_empty = engine, make_empty
        self._copy: MtpHead | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[MtpHead]:
        """A collective under ZeRO-3: all ranks enter together."""
        engine = self._engine
        head = cast("MtpHead", engine.module)
        if engine.settings.zero_stage == 3:
            if self._copy is None:
                self._copy = self._make_empty().to(engine.ranks.device).requires_grad_(False)
            targets = dict(self._copy.named_parameters()) | dict(self._copy.named_buffers())
            for name, tensor in engine.full_tensors(head):
                if name in targets:
                    targets[name].copy_(tensor)
            head = self._copy
        was_training = head.training
        head.eval()
        try:
            yield head
        finally:
            head.train(was_training)
