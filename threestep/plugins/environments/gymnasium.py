"""Environments of Gymnasium's interface whose observations become text. Serves files of users:

    import gymnasium
    from threestep.plugins.environments.gymnasium import GymnasiumEnvironment

    class Lake(GymnasiumEnvironment):
        def make(self):
            return gymnasium.make("FrozenLake-v1", is_slippery=False)

        def action(self, message):                 # None: no action, which is answered by `expected`
            moves = ["left", "down", "right", "up"]
            return moves.index(message.content) if message.content in moves else None

        expected = "Say left, down, right or up."

Needs no package of its own: any object with their `reset` and `step` will do.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

from threestep.plugins.environments.interface import AssistantMessage, EnvironmentReply, Message, Opening


class GymnasiumEnvironment:
    """An environment for `--environment`: a subclass has `make`, and overrides what differs."""

    expected: ClassVar[str] = "This is not an action."
    penalty: ClassVar[float] = 0.0  # of a message without an action: where moves cost, nonsense must not be free

    def __init__(self) -> None:
        self._game: Any = None

    # For subclasses.

    def make(self) -> Any:
        """The environment of one conversation, as `gymnasium.make` returns it."""
        raise NotImplementedError("a GymnasiumEnvironment needs a method make(self) that returns the environment")

    def seed(self, row: Mapping[str, Any]) -> int:
        """The seed of `reset`: by default one that follows from the row, as all samples of a prompt must begin
        alike."""
        return zlib.crc32(json.dumps([row.get("prompt"), row.get("ground_truth")]).encode())

    def options(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options of `reset`: by default none."""
        return None

    def opening(self, row: Mapping[str, Any], text: str) -> list[Message]:
        """First messages of the conversation: by default the row's, with the observation below the last one."""
        *before, last = row["messages"]
        said = "\n\n".join(part for part in (last["content"], text) if part)
        return [*before, {**last, "content": said}]

    def action(self, message: AssistantMessage) -> Any:
        """The action for the model's message: by default its text; None if it is none."""
        return message.content

    def text(self, observation: Any) -> str:
        """The observation as text."""
        return str(observation)

    # For conversations.

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Make the environment, and begin."""
        self._game = self.make()
        begun = self._game.reset(seed=self.seed(row), options=self.options(row))
        if not isinstance(begun, tuple) or len(begun) != 2:
            raise TypeError(f"reset must return (observation, info), as in Gymnasium, got {begun!r:.60}")
        return Opening(self.opening(row, self.text(begun[0])))

    def step(self, message: AssistantMessage) -> EnvironmentReply:
        """Act. A message without an action changes nothing, and is counted as `no_actions`."""
        action = self.action(message)
        if action is None:
            told: list[Message] = [{"role": "user", "content": self.expected}]
            return EnvironmentReply(told, -self.penalty, figures={"no_actions": 1.0})
        taken = self._game.step(action)
        if not isinstance(taken, tuple) or len(taken) != 5:
            raise TypeError(f"step must return (observation, reward, terminated, truncated, info), got {taken!r:.60}")
        observation, reward, terminated, truncated, _ = taken
        done = bool(terminated or truncated)
        following = [] if done else [{"role": "user", "content": self.text(observation)}]
        return EnvironmentReply(following, float(reward), done)

    def close(self) -> None:
        """Close the environment."""
        if self._game is not None:
            self._game.close()
