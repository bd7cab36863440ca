"""Best of n: the curve by hand, which responses become rows, how they are stored, rounds as settings of programs."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from threestep.plugins.evaluation.best_of.curve import curve_of, divergence_of_best, over_optimised, picked_of
from threestep.plugins.evaluation.best_of.kept import kept_rows
from threestep.plugins.evaluation.best_of.rounds import TrainingRounds, judged_by
from threestep.plugins.evaluation.best_of.store import ANSWERS, AnswerStore
from training.utils.base.errors import ThreestepError
from training.utils.flags.step import known_steps
from training.utils.rewards.figures import best_of


def test_by_hand():
    """Rewards 0, 1, 2 with checks 5, 3, 1: of the three pairs the reward picks 1, 2, 2 with checks 3, 1, 1."""
    one, two, three = curve_of([{"reward": [1.0, 0.0, 2.0], "check": [3.0, 5.0, 1.0]}], seed=1)
    assert [point.k for point in (one, two, three)] == [1, 2, 3]
    assert [point.reward.value for point in (one, two, three)] == pytest.approx([1.0, 5 / 3, 2.0])
    assert [point.check.value for point in (one, two, three)] == pytest.approx([3.0, 5 / 3, 1.0])
    assert [point.best_check.value for point in (one, two, three)] == pytest.approx([3.0, 13 / 3, 5.0])
    assert one.kl == 0.0


def test_it_is_the_mean_of_drawing_k(rounds=4000):
    """Against simulation: k fresh responses, the best of them, from the law that the n were drawn from."""
    draws = np.random.default_rng(1)

    def responses(shape):
        reward = draws.normal(size=shape)
        return reward, -((reward - 1.0) ** 2)  # a checker that is best at a reward of 1

    reward, check = responses((rounds, 8))
    drawn = [{"reward": r, "check": c} for r, c in zip(reward.tolist(), check.tolist(), strict=True)]
    for point in curve_of(drawn, seed=1):
        fresh, its_check = responses((rounds * 10, point.k))
        best = fresh.argmax(axis=1)
        assert point.reward.value == pytest.approx(fresh.max(axis=1).mean(), abs=0.04)
        picked = its_check[np.arange(len(best)), best].mean()
        assert point.check.low - 0.05 < picked < point.check.high + 0.05


def test_a_checker_that_falls_is_said():
    draws = np.random.default_rng(2)
    gamed = [{"reward": (r := draws.normal(size=8)).tolist(), "check": (-r).tolist()} for _ in range(50)]
    honest = [{"reward": row["reward"], "check": row["reward"]} for row in gamed]
    unchecked = [{"reward": row["reward"]} for row in gamed]
    said = over_optimised(gamed, curve_of(gamed, 1), seed=1)
    assert said.startswith("over-optimized: the checker's score for the response that the reward picks changes by -1.")
    assert said.endswith("from n = 1 to n = 8")
    for drawn in (honest, unchecked):
        assert over_optimised(drawn, curve_of(drawn, 1), seed=1) == ""
    assert curve_of(unchecked, 1)[0].check is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_the_pick_of_a_value_is_the_mean_over_all_subsets(seed, k):
    """Ties among the largest of a subset are picked equally often."""
    draws = np.random.default_rng(seed)
    values = draws.integers(0, 3, 6).tolist()
    others = [float(draws.normal()) for _ in range(6)]
    picks = []
    for subset in itertools.combinations(range(6), k):
        best = max(values[i] for i in subset)
        picks.append(np.mean([others[i] for i in subset if values[i] == best]))
    assert picked_of(values, others, k) == pytest.approx(np.mean(picks))
    assert picked_of(others, others, k) == pytest.approx(best_of(others, k))


def test_the_divergence_of_the_best_and_many_responses():
    found = [divergence_of_best(k) for k in (1, 2, 4, 16, 64)]
    assert found == pytest.approx([0.0, 0.193147, 0.636294, 1.835089, 3.174508], abs=1e-6)
    # Of a uniform law, the best of k has the density k u^(k - 1) against 1: the integral of its log.
    u = (np.arange(200_000) + 0.5) / 200_000
    assert np.mean(3 * u**2 * np.log(3 * u**2)) == pytest.approx(divergence_of_best(3), abs=1e-6)
    values = [float(number) for number in range(1200)]
    assert best_of(values, 600) == pytest.approx(600 * 1201 / 601 - 1)


# --- which responses become rows


def answered(*responses, ended=None, text="1 + 1 ="):
    """responses: (text, reward)."""
    texts, rewards = zip(*responses, strict=True)
    return {
        "prompt": text, "responses": list(texts), "reward": list(rewards), "ended": ended or [True] * len(texts),
        "ground_truth": "2", "data_source": None,
    }  # fmt: skip


def kept(*drawn, keep_best=1, min_reward=None, keep_cut=False):
    return kept_rows(drawn, SimpleNamespace(keep_best=keep_best, min_reward=min_reward, keep_cut=keep_cut))


CUT = answered((" a", 1.0), (" b", 3.0), (" c", 0.0), ended=[True, False, True])
FOUR = answered((" a", 4.0), (" b", 3.0), (" c", 2.0), (" d", 1.0))
NONE = answered((" a", 1.0), ended=[False])


@pytest.mark.parametrize(
    ("drawn", "how", "pairs", "left_out"),
    [
        ([answered((" a", 1.0), (" b", 1.0))], {}, [(" a", None)], {}),  # of equal rewards the first
        ([answered((" a", 0.0), (" a", 1.0))], {}, [(" a", None)], {}),  # the same text twice is one response
        ([CUT], {}, [(" a", " c")], {}),
        ([CUT], {"keep_cut": True}, [(" b", " c")], {}),
        ([NONE, CUT], {}, [(" a", " c")], {"cut_or_empty": 1}),
        # An empty response is never kept: steps 1 and 2 drop rows with one.
        ([answered(("", 5.0), (" a", 1.0), (" b", 0.0), (" ", -1.0))], {}, [(" a", " b")], {}),
        ([answered((" ", 1.0), ("", 0.0))], {"keep_cut": True}, [], {"cut_or_empty": 1}),
        ([FOUR], {"keep_best": 2}, [(" a", " d"), (" b", " c")], {}),
        ([FOUR], {"keep_best": 4}, [(" a", " d"), (" b", " c"), (" c", None), (" d", None)], {}),
        ([FOUR], {"keep_best": 4, "min_reward": 3.0}, [(" a", " d"), (" b", " c")], {}),
        ([FOUR], {"min_reward": 5.0}, [], {"below_min_reward": 1}),
    ],
)
def test_the_best_are_kept_against_the_worst(drawn, how, pairs, left_out):
    found = kept(*drawn, **how)
    assert [(row["chosen"], row["rejected"]) for row in found.rows] == pairs and found.left_out == left_out
    assert found.pairs == sum(rejected is not None for _, rejected in pairs)


def test_rows_have_what_training_reads():
    assert kept(answered((" 3", 0.0), (" 2", 1.0), (" 9", -2.0), (" 1", 0.5))).rows == [
        {
            "prompt": "1 + 1 =", "chosen": " 2", "rejected": " 9", "chosen_reward": 1.0, "rejected_reward": -2.0,
            "ground_truth": "2",
        }
    ]  # fmt: skip
    [row] = kept(answered((" a", 0.0), (" a", 1.0))).rows  # also where a reward is noisy
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, None)
    messages = [{"role": "user", "content": "1 + 1?"}]
    [row] = kept(answered(("2", 1.0), ("3", 0.0), text=messages)).rows
    assert row["prompt"] == messages
    assert [row[side] for side in ("chosen", "rejected")] == [[{"role": "assistant", "content": x}] for x in "23"]


# --- batches are kept whole, once, and only beside those of the same settings

BATCHES = [range(2), range(2, 3)]


def drawn(place, prompt, **more):
    scores = {"responses": ["x", "y"], "ended": [True, False], "reward": [0.5, 1.0], "check": [1.0, 0.0]}
    return {"prompt_index": place, "prompt": prompt, "ground_truth": None, "data_source": "s", **scores, **more}


ONE, TWO = [drawn(0, "a\u2028b"), drawn(1, [{"role": "user", "content": "c"}])], [drawn(2, "d")]


def test_what_is_missing_and_what_is_there(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin({"--seed": 1}, overwrite=False)
    assert store.missing(BATCHES) == [0, 1]
    store.add(1, TWO)
    (tmp_path / "batches" / ".000000.jsonl.77").write_text('{"prompt": "a half')  # of a killed process
    again = AnswerStore(tmp_path)
    again.begin({"--seed": 1}, overwrite=False)
    assert again.missing(BATCHES) == [0]
    again.add(0, ONE)
    assert again.close(BATCHES) == ONE + TWO
    assert sorted(path.name for path in tmp_path.iterdir()) == [ANSWERS, "settings.json"]
    # Killed behind the last batch, it is closed again.
    again.begin({"--seed": 1}, overwrite=False)
    assert again.missing(BATCHES) == [] and again.close(BATCHES) == ONE + TWO


def test_other_settings_are_refused_or_drawn_again(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin({"--seed": 1, "--reward": "length"}, overwrite=False)
    store.add(0, ONE)
    expected = "holds responses generated with other settings: --seed changed from 1 to 2; restore those settings, use"
    with pytest.raises(ThreestepError, match=expected):
        store.begin({"--seed": 2, "--reward": "length"}, overwrite=False)
    assert store.missing(BATCHES) == [1]
    store.begin({"--seed": 2, "--reward": "length"}, overwrite=True)
    assert store.missing(BATCHES) == [0, 1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff", "is not UTF-8 text"),
        (b"[" * 100_000, "line 1: .*JSON"),
        (b"{}\n", "prompt_index is missing"),
        (b"", "should hold prompts 2 to 2, one per line"),
        (json.dumps(ONE[0]).encode(), "should hold prompts 2 to 2"),
        (json.dumps(drawn(2, "d", reward=[1.0, None])).encode(), "reward.1 expects"),
        (json.dumps(drawn(2, "d", reward=[1.0, math.inf])).encode(), "finite score"),
        (json.dumps(drawn(2, "d", responses=["x"])).encode(), "one finite score per response"),
        (
            json.dumps(drawn(2, "d", responses=[], ended=[], reward=[], check=[])).encode(),
            "the same number of responses per prompt",
        ),
    ],
)
def test_a_damaged_file_of_responses_is_named_with_its_remedy(tmp_path, content, expected):
    store = AnswerStore(tmp_path)
    store.begin({}, overwrite=False)
    store.add(0, ONE)
    store.add(1, TWO)
    (tmp_path / "batches" / "000001.jsonl").write_bytes(content)
    with pytest.raises(
        ThreestepError, match=rf"000001.jsonl.*{expected}.*; remove this file to generate its responses"
    ):
        store.close(BATCHES)
    (tmp_path / "batches" / "000001.jsonl").unlink()
    assert store.missing(BATCHES) == [1]
    store.add(1, TWO)
    assert store.close(BATCHES) == ONE + TWO
    (tmp_path / ANSWERS).write_text(json.dumps(ONE[0]) + "\n")
    with pytest.raises(ThreestepError, match=rf"{ANSWERS} should hold prompts 0 to 2, one per line; remove this file"):
        store.close(BATCHES)


@pytest.mark.parametrize("content", ["", "[1]", '{"--seed": 1', None])
def test_responses_without_their_settings_are_not_taken_for_those_of_any(tmp_path, content):
    store, path = AnswerStore(tmp_path), tmp_path / "settings.json"
    store.begin({"--seed": 1}, overwrite=False)
    store.add(0, ONE)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ThreestepError, match="settings.json.*; use another --output_dir, or add --overwrite to start"):
        store.begin({"--seed": 2}, overwrite=False)
    store.begin({"--seed": 2}, overwrite=True)
    assert store.missing(BATCHES) == [0, 1]


COMMON = {
    "data_path": ["gsm8k"], "dataset_module": "a.py", "prompt_column": "question", "data_format": "question_answer",
    "max_seq_len": 64, "zero_stage": 1, "seed": 7,
}  # fmt: skip
DRAWING = {"reward": "gsm8k:2,model", "checker": "a.py:exact", "num_samples_per_prompt": 4, "temperature": 0.7}


def rounds(**given) -> TrainingRounds:
    step = known_steps()["step2_dpo"]
    return TrainingRounds(2, Path("runs/x"), "sft/model", COMMON, {**DRAWING, **given}, {"beta": 0.2}, step)


def test_each_round_starts_from_the_model_of_the_last():
    stages = rounds().stages()
    assert [(stage.name, stage.settings["model_name_or_path"]) for stage in stages] == [
        ("evaluation", "sft/model"),
        ("best_of", "sft/model"),
        ("step2_dpo", "sft/model"),
        ("evaluation", "runs/x/rounds/1/step2_dpo/model"),
        ("best_of", "runs/x/rounds/1/step2_dpo/model"),
        ("step2_dpo", "runs/x/rounds/1/step2_dpo/model"),
        ("evaluation", "runs/x/rounds/2/step2_dpo/model"),
    ]
    assert [stage.settings["output_dir"] for stage in stages] == [str(stage.folder) for stage in stages]


def test_each_program_gets_the_settings_that_it_knows():
    judging, drawing, training, *_ = rounds().stages()
    assert drawing.settings == {
        "part": "1/2", "data_split": "2,4,4", "data_path": ["gsm8k"], "dataset_module": "a.py",
        "prompt_column": "question", "data_format": "question_answer", "max_seq_len": 64, "seed": 7, **DRAWING,
        "model_name_or_path": "sft/model", "output_dir": "runs/x/rounds/1/best_of",
    }  # fmt: skip
    # Of the prompts' files it reads nothing; the rows have a form of their own.
    assert training.settings == {
        "dataset_module": "a.py", "max_seq_len": 64, "zero_stage": 1, "seed": 7, "data_split": "0,1,0", "beta": 0.2,
        "data_path": ["jsonl:runs/x/rounds/1/best_of/rows.jsonl"], "data_format": "preference",
        "model_name_or_path": "sft/model", "output_dir": "runs/x/rounds/1/step2_dpo",
    }  # fmt: skip
    assert judging.words == ("reward",) and judging.settings["reward"] == "gsm8k:2,model,a.py:exact:0"
    assert judging.settings["split"] == "eval" and judging.settings["temperature"] == 0.7
    assert not {"part", "num_samples_per_prompt", "checker", "zero_stage"} & judging.settings.keys()
    assert rounds(part="1/1").stages()[1].settings["part"] == "1/1"
    assert rounds(misspelt=1).stages()[1].settings["misspelt"] == 1  # which the program refuses


def test_the_checker_is_judged_once():
    assert judged_by({"reward": "embedded", "checker": "embedded"}) == "embedded"
    assert judged_by({"reward": "b.py:good:0.5", "checker": "a.py:good"}) == "b.py:good:0.5"
    assert judged_by({"checker": "embedded"}) == "model,embedded:0"
    assert judged_by({"reward": "length"}) == "length"
