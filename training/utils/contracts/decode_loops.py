"""A decode loop in the place of an engine's own: how flags ask for it, and what draws. Plugins have some
(`decode_loops` of `Plugin.tables`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest


class DecodeLoop:
    """Draws rollouts from a model in this process. A response depends on its prompt and its seed alone. This one draws
    by the engine's own loop; one of a plugin, by forwards of its own.

    name: of the flag that asks for it; "" where none does.
    prefill_tokens: of prompts that one forward reads, as the engine has found them to fit; None: all.
    """

    name: str = ""
    prefill_tokens: int | None = None

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, what it draws by besides the model has its current weights. Every rank must enter together."""
        yield

    def check(self, model: PreTrainedModel, own: Any, way: Any) -> list[str]:
        """Return sentences on what it costs; inside `lent`, before the first rollout. ThreestepError if it cannot draw
        from a model. own, way: `models.own_forward.OwnForward`, and the `DecodeWay` that gives its numbers."""
        return []

    def drawn(
        self, model: PreTrainedModel, request: RolloutRequest, stop: Any, plain: Callable[[], Rollout]
    ) -> Rollout:
        """Return a rollout; inside `lent`. stop: texts that end responses, as `DrawnResponses` takes them. plain: draws
        it by the engine's own loop."""
        return plain()

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts since the last call."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state that rollouts change, as JSON holds it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class AskedLoop:
    """A loop that the flags of a run ask for.

    name, value: of the flag that asks.
    why_texts_alone: why it cannot draw behind media, as the end of a sentence whose subject it is; "": it can.
    """

    name: str = ""
    value: Any = None
    why_texts_alone: str = ""

    def fits(self, engine: type[RolloutEngine]) -> bool:
        """Return whether an engine can draw by it."""
        return engine.takes_loops

    def check(self, mistakes: Mistakes) -> None:
        """Note flags that do not go with it."""

    def choices(self) -> Sequence[Any]:
        """Return the `flags.flags.AutoChoice` of each of its flags that was left to `auto`."""
        return ()

    def open(self, model: Any, guests: Guests, seed: int, tell: Callable[[str], None]) -> Any:
        """Return what `RolloutEngine.draw_by` takes, a `DecodeLoop` for engines of this process. guests: what trains
        beside the model. seed: of the run. tell: prints a sentence. A collective."""
        raise NotImplementedError
