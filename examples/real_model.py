"""Short tasks with answers that a program can check, for `scripts/real_model.sh`.

    python examples/real_model.py tasks.jsonl                     # writes the tasks
    threestep grpo ... --reward examples/real_model.py:checked --checker examples/real_model.py:exact
    python examples/real_model.py table OUT [OUT ...]             # prints the results; one folder per seed

Five kinds, one fifth of the rows each: a sum, a count of words, words in alphabetical order, a JSON object with given
keys, and a sentence of a given length. Each prompt says how to answer. `expected` holds what the check needs.
"""

from __future__ import annotations

import json
import random
import re
import statistics
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
    prompt = f"Write one sentence of exactly {count} words that contains the words {one} and {other}."
    return prompt, f"{count} words: {one} {other}"


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (a_sum, a_count, an_order, an_object, a_length)


def rows(count: int, draw: random.Random) -> list[dict[str, str]]:
    """Return `count` rows with different prompts."""
    found: dict[str, dict[str, str]] = {}
    while len(found) < count:
        prompt, expected = KINDS[len(found) % len(KINDS)](draw)
        found[prompt] = {"prompt": prompt, "expected": expected}
    return list(found.values())


def checked(prompts: list[str], responses: list[str], *, expected: list[str], **_: object) -> list[float]:
    """Return 1 for a right answer in the right form, 0.5 for a right answer in another form, and 0 otherwise.

    A right form alone earns nothing: with 0.2 for it, SmolLM2-135M learned to answer "2" to every question for a
    number (docs/lab_book/2026-q4-public-model.md).
    """
    return [score(response.strip(), answer) for response, answer in zip(responses, expected, strict=True)]


def exact(prompts: list[str], responses: list[str], *, expected: list[str], **_: object) -> list[float]:
    """Return 1 for a right answer in the right form, and 0 otherwise."""
    return [float(score(response.strip(), answer) == 1) for response, answer in zip(responses, expected, strict=True)]


def score(response: str, expected: str) -> float:
    """See `checked`. A sentence that contains its words and has up to two words too many or too few earns 0.5."""
    if response == expected:
        return 1.0
    if expected.isdigit():
        return 0.5 if re.findall(r"\d+", response)[-1:] == [expected] else 0.0
    if expected.startswith("{"):
        objects = re.findall(r"{.*?}", response, flags=re.DOTALL)
        right = bool(objects) and _parsed(objects[0]) == json.loads(expected)
        return (1.0 if objects[0] == response else 0.5) if right else 0.0
    count, _, words = expected.partition(" words: ")
    if words:
        found = re.findall(r"[\w'-]+", response.lower())
        is_sentence = re.fullmatch(r"[^.!?\n]+[.!?]", response) is not None
        if not is_sentence or not set(words.split()) <= set(found) or abs(len(found) - int(count)) > 2:
            return 0.0
        return 1.0 if len(found) == int(count) else 0.5
    return 0.5 if re.findall(r"\w+", response.lower()) == expected.split(", ") else 0.0


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


FIGURES = (  # part, figure, its names in the part's summary.json
    ("sft", "held-out loss (nats per token)", "eval_loss_before", "eval_loss_after"),
    ("reward", "held-out pair accuracy", "eval_accuracy_before", "eval_accuracy"),
    ("dpo", "held-out loss", "eval_loss_before", "eval_loss"),
    ("ppo", "mean reward of held-out prompts", "reward_before", "reward_after"),
    ("grpo", "mean reward of held-out prompts", "reward_before", "reward_after"),
    ("grpo", "exact answers to held-out prompts", "checker_before", "checker_after"),
)
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 %, by the number of seeds


def table(folders: list[Path]) -> str:
    """Return the results of `folders`, one per seed, in Markdown: means, and the gain with its 95 % interval."""
    lines = ["| part | figure | seeds | before | after | gain | seconds |", "| --- | --- " + "| --: " * 5 + "|"]
    for part, figure, before, after in FIGURES:
        paths = [folder / part / "summary.json" for folder in folders]
        runs = [run for run in (json.loads(path.read_text()) for path in paths if path.is_file()) if before in run]
        if not runs:
            continue
        gains = [run[after] - run[before] for run in runs]
        means = [statistics.mean(run[key] for run in runs) for key in (before, after)]
        gain = f"{statistics.mean(gains):+.3f}"
        if len(gains) in STUDENT_T:
            gain += f" ± {STUDENT_T[len(gains)] * statistics.stdev(gains) / len(gains) ** 0.5:.3f}"
        seconds = statistics.mean(run["seconds"] for run in runs)
        lines.append(f"| {part} | {figure} | {len(runs)} | {means[0]:.3f} | {means[1]:.3f} | {gain} | {seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "table":
        print(table([Path(folder) for folder in sys.argv[2:]]))
    else:
        lines = (json.dumps(row) + "\n" for row in rows(ROWS, random.Random(SEED)))  # noqa: S311 - no secret
        Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")
