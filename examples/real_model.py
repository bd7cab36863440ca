"""Short tasks with answers that a program can check, for `scripts/real_model.sh`.

    python examples/real_model.py tasks.jsonl
    threestep grpo ... --reward examples/real_model.py:checked

Five kinds, one fifth of the rows each: a sum, a count of words, words in alphabetical order, a JSON object with given
keys, and a sentence of a given length. Each prompt says how to answer. `expected` holds what the check needs.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROWS, SEED = 2000, 7
WORDS = (
    "apple bread chair cloud dream earth field glass grape house island jacket kitchen lemon mirror night ocean paper "
    "queen river stone table uncle violin water yellow zebra window garden pencil"
).split()
NAMES = "Anna Ben Carla David Emma Felix Grace Henry Iris Jonas".split()
TOWNS = "Athens Berlin Cairo Dublin Lima Madrid Oslo Paris Rome Tokyo".split()


def a_sum(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(2, 60), draw.randint(2, 60)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def a_count(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, draw.randint(2, 8))
    return f"How many words are in this list: {' '.join(words)}? Answer with the number only.", str(len(words))


def an_order(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, draw.randint(2, 4))
    listed = ", ".join(words)
    return f"Sort alphabetically: {listed}. Answer with the words only, separated by commas.", ", ".join(sorted(words))


def an_object(draw: random.Random) -> tuple[str, str]:
    name, age, town = draw.choice(NAMES), draw.randint(18, 90), draw.choice(TOWNS)
    said = f"{name} is {age} years old and lives in {town}."
    prompt = f'{said} Write this as a JSON object with the keys "name", "age" and "town". Answer with the JSON only.'
    return prompt, json.dumps({"name": name, "age": age, "town": town})


def a_length(draw: random.Random) -> tuple[str, str]:
    count, (one, other) = draw.randint(4, 9), draw.sample(WORDS, 2)
    return f"Write one sentence of exactly {count} words with: {one}, {other}.", f"{count} words"


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (a_sum, a_count, an_order, an_object, a_length)


def rows(count: int, draw: random.Random) -> list[dict[str, str]]:
    """Return `count` rows with different prompts."""
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        prompt, expected = KINDS[len(found) % len(KINDS)](draw)
        found[prompt] = {"prompt": prompt, "expected": expected}
    return list(found.values())


def checked(prompts: list[str], responses: list[str], *, expected: list[str], **_: object) -> list[float]:
    """Return 1 for a right answer, 0.2 for a wrong one in the right form, and 0 otherwise."""
    return [score(response.strip(), answer) for response, answer in zip(responses, expected, strict=True)]


def score(response: str, expected: str) -> float:
    """See `checked`. The form: a number alone, words and commas alone, a JSON object, one sentence."""
    if response == expected:
        return 1.0
    if expected.isdigit():
        return 0.2 if response.isdigit() else 0.0
    if expected.endswith(" words"):
        words, wanted = len(response.split()), int(expected.split()[0])
        is_sentence = re.fullmatch(r"[^.!?\n]+[.!?]", response) is not None
        return (1.0 if words == wanted else 0.2) if is_sentence else 0.0
    if expected.startswith("{"):
        try:
            found = json.loads(response)
        except ValueError:
            return 0.0
        return (1.0 if found == json.loads(expected) else 0.2) if isinstance(found, dict) else 0.0
    return 0.2 if re.fullmatch(r"\w+(, \w+)+", response) else 0.0


if __name__ == "__main__":
    lines = (json.dumps(row) + "\n" for row in rows(ROWS, random.Random(SEED)))  # noqa: S311 - no secret
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")
