"""Rows whose task is to sort words: pairs of responses of many lengths, and conversations."""

from __future__ import annotations

import random
from typing import Any

WORDS = "pear apple fig plum cherry quince lemon".split()


def pair_rows(count: int) -> list[dict[str, Any]]:
    """Prompts with a chosen and a rejected response of many lengths."""
    dice = random.Random(0)
    rows = []
    for _ in range(count):
        chosen = dice.choices(WORDS, k=dice.randint(1, 6))
        rejected = dice.choices(WORDS, k=dice.randint(1, 6)) + ["times"]
        prompt = f"Human: Sort these words: {' '.join(dice.sample(chosen, len(chosen)))}. Assistant:"
        texts = {"prompt": prompt, "chosen": " " + " ".join(sorted(chosen)), "rejected": " " + " ".join(rejected)}
        rows.append({**texts, "margin": len(rejected) / 4})
    return rows


def conversations() -> list[dict[str, Any]]:
    """Forty conversations of two turns, some with a system message, and what a row may carry beside them."""
    rows = []
    for number in range(40):
        words = [["fig", "apple"], ["plum", "lemon", "cherry"]][number % 2]
        prompt = [
            {"role": "system", "content": f"You sort. {number}"},
            {"role": "user", "content": "Hello there"},
            {"role": "assistant", "content": "HELLO THERE"},
            {"role": "user", "content": f"Sort: {' '.join(words)}"},
        ]
        right, wrong = " ".join(sorted(words)), " ".join(words * 2)
        row = {"prompt": prompt[number % 3 == 0 :], "data_source": "sorting"}  # with and without a system message
        row |= {
            name: [{"role": "assistant", "content": text}] for name, text in (("chosen", right), ("rejected", wrong))
        }
        known = {"index": number, "tools_kwargs": {"search": {"k": number}}}
        rows.append({**row, "ground_truth": right, "level": number, "extra_info": known})
    return rows
