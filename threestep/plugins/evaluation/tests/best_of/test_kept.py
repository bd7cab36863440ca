"""Which responses become rows: best against worst, ties, cut ones, a threshold."""

from __future__ import annotations

from types import SimpleNamespace

from threestep.plugins.evaluation.best_of.kept import kept_rows


def flags(keep_best=1, min_reward=None, keep_cut=False):
    return SimpleNamespace(keep_best=keep_best, min_reward=min_reward, keep_cut=keep_cut)


def prompt(*responses, ended=None, text="1 + 1 ="):
    """responses: (text, reward)."""
    texts, rewards = zip(*responses, strict=True)
    return {
        "prompt": text, "responses": list(texts), "reward": list(rewards), "ended": ended or [True] * len(texts),
        "ground_truth": "2", "data_source": None,
    }  # fmt: skip


def pairs(drawn, **given):
    return [(row["chosen"], row["rejected"]) for row in kept_rows(drawn, flags(**given)).rows]


def test_the_best_against_the_worst():
    kept = kept_rows([prompt((" 3", 0.0), (" 2", 1.0), (" 9", -2.0), (" 1", 0.5))], flags())
    assert kept.rows == [
        {
            "prompt": "1 + 1 =", "chosen": " 2", "rejected": " 9", "chosen_reward": 1.0, "rejected_reward": -2.0,
            "ground_truth": "2",
        }
    ]  # fmt: skip
    assert kept.pairs == 1 and not kept.left_out


def test_of_equal_rewards_the_first_is_chosen_and_none_rejected():
    kept = kept_rows([prompt((" a", 1.0), (" b", 1.0))], flags())
    assert [(row["chosen"], row["rejected"], row["rejected_reward"]) for row in kept.rows] == [(" a", None, None)]
    assert kept.pairs == 0
    # The same text twice is one response, also where a reward is noisy.
    [row] = kept_rows([prompt((" a", 0.0), (" a", 1.0))], flags()).rows
    assert (row["chosen"], row["rejected"], row["chosen_reward"]) == (" a", None, 1.0)


def test_cut_responses_are_kept_on_request():
    one = prompt((" a", 1.0), (" b", 3.0), (" c", 0.0), ended=[True, False, True])
    assert pairs([one]) == [(" a", " c")] and pairs([one], keep_cut=True) == [(" b", " c")]
    none = prompt((" a", 1.0), ended=[False])
    kept = kept_rows([none, one], flags())
    assert len(kept.rows) == 1 and kept.left_out == {"cut_or_empty": 1}


def test_an_empty_response_is_never_kept():
    """Steps 1 and 2 drop rows with one."""
    assert pairs([prompt(("", 5.0), (" a", 1.0), (" b", 0.0), (" ", -1.0))]) == [(" a", " b")]
    assert kept_rows([prompt((" ", 1.0), ("", 0.0))], flags(keep_cut=True)).left_out == {"cut_or_empty": 1}


def test_several_kept_and_a_threshold():
    one = prompt((" a", 4.0), (" b", 3.0), (" c", 2.0), (" d", 1.0))
    assert pairs([one], keep_best=2) == [(" a", " d"), (" b", " c")]
    assert pairs([one], keep_best=4) == [(" a", " d"), (" b", " c"), (" c", None), (" d", None)]
    assert pairs([one], keep_best=4, min_reward=3.0) == [(" a", " d"), (" b", " c")]
    kept = kept_rows([one], flags(min_reward=5.0))
    assert not kept.rows and kept.left_out == {"below_min_reward": 1}


def test_a_conversation_is_kept_as_messages():
    messages = [{"role": "user", "content": "1 + 1?"}]
    [row] = kept_rows([prompt(("2", 1.0), ("3", 0.0), text=messages)], flags()).rows
    assert row["prompt"] == messages
    assert row["chosen"] == [{"role": "assistant", "content": "2"}]
    assert row["rejected"] == [{"role": "assistant", "content": "3"}]
