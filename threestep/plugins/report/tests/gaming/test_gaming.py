"""Gamed rewards: features of texts by hand, the account beside a least-squares fit, its sentences, a run's watch."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from threestep.plugins.report.gaming.account import GamingAccount, account_of
from threestep.plugins.report.gaming.sentences import signs_of_gaming
from threestep.plugins.report.gaming.surface import FEATURES, features_of, lines, marks, repetition
from threestep.plugins.report.gaming.values import Values, values_of
from threestep.plugins.report.gaming.watch import RewardWatch, open_watch
from training.utils.run.run_folder import RunFolder


def test_features_of_a_text():
    assert marks("**Yes**, no") == pytest.approx(5 / 10)  # ** ** and the comma, of ten signs that are no space
    assert marks("") == 0.0
    assert lines("one\ntwo\n") == 2.0 and lines("") == 1.0
    assert repetition("cat cat cat cat") == pytest.approx(2 / 3)  # three pairs, of which one is new
    assert repetition("a b a b") == pytest.approx(1 / 3) and repetition("a") == 0.0


def test_features_of_samples():
    found = features_of(
        [
            {"prompt_index": 0, "response": " owl", "response_tokens": 2},
            {"prompt_index": 0, "response": " owl", "response_tokens": 2},  # of the same prompt
            {"prompt_index": 1, "response": "first turn", "last_turn": "cat", "response_tokens": 3},
            {"prompt_index": 2, "response": "cat ", "response_tokens": 4},
        ]
    )
    assert found.keys() == FEATURES.keys()
    assert (found["length"], found["sameness"]) == ([2.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("reward", "checker", "trained", "held_out"),
    [
        ("model:1.0", None, (), ()),
        ("model,judge:a/kind.yaml:0", "gsm8k", (), ("reward/kind", "check")),
        ("model:2,length:0.5,f.py:mine:0", None, ("reward/model", "reward/length"), ("reward/mine",)),
        ("embedded", "embedded", (), ()),
        ("embedded:0,model", "embedded", (), ("reward/embedded",)),  # one value, counted once
    ],
)
def test_weights_of_0_and_a_checker_that_is_not_trained_on_are_held_out(reward, checker, trained, held_out):
    assert values_of(reward, checker) == Values(trained, held_out)


# --- the account

CHECK = Values((), ("check",))


def sample(index: int, reward: float, text: str = "a b", **more) -> dict:
    own = {"prompt_index": index, "sample": 0, "response": text, "response_tokens": len(text), "reward": reward}
    return {**own, **more}


def test_drifts_are_paired_by_prompt():
    before = [sample(0, 1.0, check=1.0), sample(1, 2.0, check=0.0), sample(2, 9.0)]
    after = [sample(1, 4.0, check=0.5), sample(0, 2.0, check=0.5), sample(3, 9.0)]
    account = account_of(before, after, CHECK)
    score, check = account.drifts
    assert (score.name, score.is_trained, score.before, score.after) == ("reward", True, 1.5, 3.0)
    assert score.error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))  # gains 1 and 2: deviation sqrt(1/2)
    assert score.deviation == pytest.approx(math.sqrt(1.1875))  # of 1, 2, 4, 2 around 2.25
    assert (check.name, check.is_trained, check.gain) == ("check", False, 0.0)
    assert account.held_out == [check] and account.explained is None  # too few samples


def test_samples_of_one_prompt_are_one_gain():
    """Two prompts with two samples each: the error is that of two gains, 1 and 3."""
    places = [(index, place) for index in (0, 1) for place in (0, 1)]
    before = [sample(index, 0.0, sample=place) for index, place in places]
    after = [sample(index, gain, sample=place) for (index, place), gain in zip(places, (0, 2, 2, 4), strict=True)]
    account = account_of(before, after, Values())
    assert account.score.gain == 2.0 and account.score.error == pytest.approx(1.0)


def test_nothing_in_common_is_no_account():
    one = [sample(0, 1.0)]
    for before, after in ((one, [sample(1, 1.0)]), ([sample(0, math.nan)], one), ([], [])):
        assert account_of(before, after, CHECK) is None


def test_the_share_of_the_gain_is_that_of_a_least_squares_fit():
    """Against the normal equations in float64: coefficients times the changes of the means, over the gain."""
    dice = random.Random(3)
    made = []
    for shift in (0, 2):
        texts = ["x" * (3 + shift + dice.randrange(4)) + "!" * dice.randrange(1 + shift) for _ in range(60)]
        made.append([sample(i, 0.5 * len(t) + dice.gauss(0, 1), t) for i, t in enumerate(texts)])
    account = account_of(*made, Values())
    shares = {feature.name: feature.share for feature in account.features}
    texts = [[each["response"] for each in side] for side in made]
    both = texts[0] + texts[1]
    tokens, marked = [float(len(text)) for text in both], [text.count("!") / len(text) for text in both]
    same = [float(side.count(text) > 1) for side in texts for text in side]
    x = torch.tensor([tokens, marked, same, [1.0] * 120], dtype=torch.float64).T
    y = torch.tensor([each["reward"] for each in made[0] + made[1]], dtype=torch.float64)
    b = torch.linalg.solve(x.T @ x, x.T @ y)
    change, gain = x[60:].mean(0) - x[:60].mean(0), y[60:].mean() - y[:60].mean()
    for place, name in enumerate(("length", "marks", "sameness")):
        assert shares[name] == pytest.approx(float(b[place] * change[place] / gain), rel=1e-9)
    assert shares["lines"] == shares["repetition"] == 0.0  # constant
    assert account.r_squared == pytest.approx(float(1 - (y - x @ b).var() / y.var()), rel=1e-9)
    assert account.explained == pytest.approx(sum(shares.values()))
    correlations = {feature.name: feature.correlations for feature in account.features}
    reference = float(torch.corrcoef(torch.stack([x[:60, 0], y[:60]]))[0, 1])
    assert correlations["length"][0] == pytest.approx(reference, rel=1e-9)
    assert correlations["lines"] == (None, None)


def test_pairs_whose_score_rose_most_while_a_checker_fell():
    before = [sample(i, 0.0, check=1.0) for i in range(20)]
    after = [sample(i, float(i), check=1.0 if i % 3 == 0 else 0.5) for i in range(20)]
    account = account_of(before, after, CHECK)
    risen = [pair.after["reward"] for pair in account.pairs]
    assert risen == [19.0, 17.0, 16.0, 14.0, 13.0, 11.0, 10.0, 8.0, 7.0, 5.0]  # ten, without multiples of 3
    assert {pair.fell for pair in account.pairs} == {("check",)}


# --- sentences: rewards that are gamed and that are not, each by its numbers


def account(reward: str, check: str, held_out: tuple[str, ...] = ("check",), seed: int = 0) -> GamingAccount:
    """Of 200 prompts. reward, check: names of COURSES."""
    dice, sides = random.Random(seed), []
    for trained in (False, True):
        side = []
        for index in range(200):
            words = ["owl", "fox", "elk", "ant", "bee", "cat", "dog", "hen"]
            dice.shuffle(words)
            words = words[: dice.randrange(1, 5)] + (["cat"] * dice.randrange(4) if trained else [])
            numbers = [COURSES[name](words, trained, dice) for name in (reward, check)]
            side.append(
                {"prompt_index": index, "response": " ".join(words), "response_tokens": len(words),
                 "reward": numbers[0], "check": numbers[1]}
            )  # fmt: skip
        sides.append(side)
    return account_of(*sides, Values((), held_out))


# Of a response's words and of whether it is trained.
COURSES = {
    "falls": lambda words, trained, dice: float(dice.random() < (0.3 if trained else 0.7)),
    "rises": lambda words, trained, dice: float(dice.random() < (0.9 if trained else 0.5)),
    "stays": lambda words, trained, dice: float(dice.random() < 0.5),
    "length": lambda words, trained, dice: float(len(words)),
}


@pytest.mark.parametrize(
    ("reward", "check", "held_out", "begins", "ends"),
    [
        ("length", "falls", ("check",), "the score rose by ", ""),
        (
            "length",
            "stays",
            ("check",),
            "100% of the score's gain is explained by length",
            "but checker did not rise with it",
        ),
        ("length", "rises", (), "", "and no held-out value checks it"),
        ("length", "rises", ("check",), None, ""),  # the checker rises too
        ("rises", "rises", ("check",), None, ""),
        ("rises", "stays", ("check",), None, ""),  # no feature explains the gain
        ("stays", "falls", ("check",), None, ""),  # the score did not rise
        ("falls", "falls", ("check",), None, ""),
    ],
)
def test_signs_of_gaming(reward, check, held_out, begins, ends):
    """begins: None without a sign."""
    found = signs_of_gaming(account(reward, check, held_out))
    assert len(found) == (begins is not None)
    assert all(sentence.startswith(begins) and sentence.endswith(ends) for sentence in found)
    if check == "falls" and found:
        assert "while checker, which is not trained on, fell by 0." in found[0]


def test_a_checker_that_is_past_its_best():
    """It rose since the start, and has fallen from its best evaluation by more than three standard errors."""
    found = account("length", "rises")
    best = 1.0 + 10 * found.held_out[0].error
    [sentence] = signs_of_gaming(found, {"check": [(0, 0.5), (5, best), (10, 0.9)]})
    assert sentence.startswith("checker, which is not trained on, has fallen by ")
    assert sentence.endswith(" since step 5")
    assert signs_of_gaming(found, {"check": [(0, 0.5), (5, 0.91), (10, 0.9)]}) == []  # within its error
    assert signs_of_gaming(found, {"check": [(0, 2.0), (5, 0.9), (10, 0.9)]}) == []  # the best was the start


# --- the log of a run's evaluations


def samples(step: int, check: float) -> list[dict]:
    return [
        sample(index, step + index % 3 / 10, step=step, prompt="one", check=check + index % 2 / 10)
        for index in range(30)
    ]  # fmt: skip


def test_a_gamed_reward_is_in_the_log_of_an_evaluation(tmp_path, capsys):
    """The first evaluation's samples come from the file, also where later ones stand behind them."""
    folder = RunFolder(tmp_path, is_main_rank=True)
    for step, check in ((0, 0.8), (5, 0.8)):
        folder.append_samples(samples(step, check))
        folder.append_samples([{**each, "greedy": True, "reward": 99.0} for each in samples(step, check)])
    watch = RewardWatch(folder, values_of("my.py:mine", "gsm8k"), "GRPO")
    [sign] = watch.signs(10, samples(10, 0.4))
    assert sign.startswith("the score rose by 10 ") and "checker, which is not trained on, fell by 0.4" in sign
    assert watch.signs(10, samples(10, 0.9)) == watch.signs(0, samples(0, 0.1)) == []
    watch.samples(10, samples(10, 0.4))
    assert capsys.readouterr().out == f"GRPO: after rollout 10, {sign}; see this section of the report\n"
    assert (
        RewardWatch(RunFolder(tmp_path, is_main_rank=False), watch.values, watch.method).signs(10, samples(10, 0.4))
        == []
    )


def test_steps_without_rewards_have_no_watch(tmp_path):
    run = SimpleNamespace(settings={"learning_rate": 0.1}, folder=RunFolder(tmp_path, is_main_rank=True))
    assert open_watch(run) is None
    run.settings = {"reward": "model:1.0,gsm8k:0", "checker": None}
    assert open_watch(run).values.held_out == ("reward/gsm8k",)
