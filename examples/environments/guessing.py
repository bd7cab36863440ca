"""A guessing game: find a number from 1 to 32 from "higher" and "lower", in few turns.

    Human: Guess my number from 1 to 32.
    Assistant: 20
    Human: lower
    Assistant: 9
    Human: higher
    Assistant: 12

`--environment examples/environments/guessing.py:Guessing` with the rows below (`--dataset_module
examples/environments/guessing.py --data_path guessing`), or your own with a number as reference answer. Each guess that
misses costs 0.1, the hit gives 1; after 10 misses the game is over. A demonstration's guess is drawn from what the
answers so far leave, or, one time in three, from all numbers: halving what is left needs fewer turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from made_conversations import MadeConversations

from threestep.plugins.embedded.task import Draws
from threestep.plugins.environments.interface import AssistantMessage, EnvironmentReply, Opening
from training.utils.data.registry import register_dataset

LARGEST, MOST_GUESSES = 32, 10
MISS, HIT = -0.1, 1.0
QUESTION = f"Guess my number from 1 to {LARGEST}."


class Guessing:
    """One game."""

    def reset(self, row: Mapping[str, Any]) -> Opening:
        self._secret, self._guesses = int(row["ground_truth"]), 0
        return Opening(row["messages"])

    def step(self, message: AssistantMessage) -> EnvironmentReply:
        self._guesses += 1
        answer = reply_to(message.content, self._secret)
        is_right, is_over = answer == "right", self._guesses == MOST_GUESSES
        figures = {"guesses": 1.0, "right": float(is_right)}
        if is_right or is_over:
            return EnvironmentReply([], HIT if is_right else MISS, True, figures)
        return EnvironmentReply([{"role": "user", "content": answer}], MISS, False, figures)

    def close(self) -> None:
        pass


def reply_to(guess: str, secret: int) -> str:
    """Return "right", "higher", "lower", or what is expected in place of something else than a number."""
    if not (guess.isascii() and guess.isdigit() and len(guess) < 10):
        return f"Say a number from 1 to {LARGEST}."
    return "right" if int(guess) == secret else "higher" if int(guess) < secret else "lower"


@register_dataset("guessing")
class GuessingRows(MadeConversations):
    """Games that a careless player wins."""

    def make_row(self, draws: Draws) -> dict[str, Any]:
        secret = 1 + draws.below(LARGEST)
        turns: list[dict[str, Any]] = []
        low, high, answer = 1, LARGEST, ""
        while answer != "right":
            first, last = (low, high) if draws.below(3) else (1, LARGEST)
            guess = first + draws.below(last - first + 1)
            if turns:
                turns.append({"role": "user", "content": answer})
            turns.append({"role": "assistant", "content": str(guess)})
            answer = reply_to(str(guess), secret)
            if answer == "higher":
                low = max(low, guess + 1)
            elif answer == "lower":
                high = min(high, guess - 1)
        return {
            "question": QUESTION,
            "turns": turns,
            "tools": None,
            "answer": str(secret),
            "environment": "Guessing",
        }
