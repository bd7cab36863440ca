"""Sentences on gamed rewards: three that are gamed, three that are not, each by its numbers."""

from __future__ import annotations

import random

from threestep.plugins.report.gaming.account import GamingAccount, account_of
from threestep.plugins.report.gaming.sentences import signs_of_gaming
from threestep.plugins.report.gaming.values import Values


def account(reward, check, held_out: tuple[str, ...] = ("check",), seed: int = 0) -> GamingAccount:
    """Of 200 prompts. reward, check: functions of a response's words and of whether it is trained."""
    dice, sides = random.Random(seed), []
    for trained in (False, True):
        side = []
        for index in range(200):
            words = ["owl", "fox", "elk", "ant", "bee", "cat", "dog", "hen"]
            dice.shuffle(words)
            words = words[: dice.randrange(1, 5)] + (["cat"] * dice.randrange(4) if trained else [])
            text = " ".join(words)
            side.append(
                {"prompt_index": index, "response": text, "response_tokens": len(words),
                 "reward": reward(words, trained, dice), "check": check(words, trained, dice)}
            )  # fmt: skip
        sides.append(side)
    found = account_of(*sides, Values((), held_out))
    assert found is not None
    return found


def falls(words: list[str], trained: bool, dice: random.Random) -> float:
    return float(dice.random() < (0.3 if trained else 0.7))


def rises(words: list[str], trained: bool, dice: random.Random) -> float:
    return float(dice.random() < (0.9 if trained else 0.5))


def stays(words: list[str], trained: bool, dice: random.Random) -> float:
    return float(dice.random() < 0.5)


def length(words: list[str], trained: bool, dice: random.Random) -> float:
    return float(len(words))


def test_a_held_out_checker_that_fell():
    [sentence] = signs_of_gaming(account(length, falls))
    assert (
        sentence.startswith("the score rose by ") and "while checker, which is not trained on, fell by 0." in sentence
    )


def test_a_gain_by_length_beside_a_checker_that_did_not_move():
    [sentence] = signs_of_gaming(account(length, stays))
    assert sentence.startswith("100% of the score's gain goes with length")
    assert sentence.endswith("and checker did not rise with it")


def test_a_gain_by_length_with_nothing_held_out():
    [sentence] = signs_of_gaming(account(length, rises, held_out=()))
    assert sentence.endswith("and nothing held out checks it")


def test_a_checker_that_rises_too_is_no_sign():
    assert signs_of_gaming(account(length, rises)) == []
    assert signs_of_gaming(account(rises, rises)) == []


def test_a_gain_that_no_feature_explains_is_no_sign():
    assert signs_of_gaming(account(rises, stays)) == []


def test_a_score_that_did_not_rise_is_no_sign():
    assert signs_of_gaming(account(stays, falls)) == []
    assert signs_of_gaming(account(falls, falls)) == []


def test_a_checker_that_is_past_its_best():
    """It rose since the start, and has fallen from its best evaluation by more than three standard errors."""
    found = account(length, rises)
    courses = {"check": [(0, 0.5), (5, 1.0 + 10 * found.held_out[0].error), (10, 0.9)]}
    [sentence] = signs_of_gaming(found, courses)
    assert sentence.startswith("checker, which is not trained on, has fallen by ") and sentence.endswith(
        " since step 5"
    )
    assert signs_of_gaming(found, {"check": [(0, 0.5), (5, 0.91), (10, 0.9)]}) == []  # within its error
    assert signs_of_gaming(found, {"check": [(0, 2.0), (5, 0.9), (10, 0.9)]}) == []  # the best was the start
