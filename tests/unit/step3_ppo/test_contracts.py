"""What passes between step 3's parts: masks and parts of rollouts come from lengths, prompts in shuffled epochs or in
the dataset's order, lines of rollouts.jsonl, and statistics of numbers that ranks share out among them."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from functools import reduce

import numpy as np
import pytest
import torch

from tests.support.rollouts import rollout_of
from training.step3_ppo.contracts import rollouts
from training.step3_ppo.contracts.measures import NOTHING, STATISTICS, Measure, Moments, figures_of, moments, spread
from training.step3_ppo.contracts.rollouts import PromptSource, RolloutEvents, RolloutsOfStep, Times
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import ServerShare
from training.utils.contracts.rows import PromptRow
from training.utils.layout.order import ShuffledStream
from training.utils.run.run_folder import RunLog


def test_masks_and_parts_come_from_lengths():
    """In the second rollout the pad is the end token, and the second 9 of its prompt is a token of it."""
    rollout = rollout_of([[5, 6, 7], [8]], [[4, 9], [3, 3, 3]])
    assert rollout.response_mask_BR.tolist() == [[True, True, False], [True, True, True]]
    assert [rollout.prompt_of(index).tolist() for index in range(2)] == [[5, 6, 7], [8]]
    assert [rollout.response_of(index).tolist() for index in range(2)] == [[4, 9], [3, 3, 3]]
    rollout = rollout_of([[9, 5], [1, 2, 3]], [[4, 9], [1, 2, 9]], pad=9)
    assert rollout.prompt_ids_BP[0].tolist() == [9, 9, 5] and rollout.response_ids_BR[0].tolist() == [4, 9, 9]
    assert rollout.prompt_of(0).tolist() == [9, 5] and rollout.response_of(0).tolist() == [4, 9]
    assert rollout.response_mask_BR[0].tolist() == [True, True, False]


def test_a_text_has_no_end_token():
    """Nor does it lose its last token where a stop string ended it."""
    ended_B = torch.tensor([True, True, False])
    rollout = rollout_of([[5]] * 3, [[4, 9], [3, 7], [3, 3, 3]], ended_B=ended_B)
    assert rollout.texts(torch.Tensor.tolist, {9}) == ["[4]", "[3, 7]", "[3, 3, 3]"]


def rows(count):
    return [PromptRow(i, np.array([i + 10], np.int32), f"prompt {i}", str(i)) for i in range(count)]


def test_shuffled_epochs_are_the_default():
    prompts = rows(5)
    source = PromptSource(prompts, 5)
    stream = ShuffledStream(5, 5)
    for first, count in ((0, 3), (3, 9), (1, 2)):  # a function of the position: any order
        assert [row.row_id for row in source.take(first, count)] == stream.take(first, count)
    source.load_state_dict(source.state_dict())
    assert source.state_dict() == {}
    in_order = PromptSource(prompts, 5, shuffled=False)
    assert [row.row_id for row in in_order.take(3, 4)] == [3, 4, 0, 1]


def test_the_state_of_a_choice_of_prompts_is_refused():
    with pytest.raises(ThreestepError, match="the saved run chose its prompts with a dataset and a sampler"):
        PromptSource(rows(2), 1).load_state_dict({"sampler": {}, "dataset": {}})


def test_lines_name_weights_times_rows_and_reasons(tmp_path):
    events = RolloutEvents(RunLog(tmp_path / "log"), "hf", prompts=4, per_step=2)
    events.trained(RolloutsOfStep(1, 0, (), (), 0.5, Times(1.0, 2.0, 3.0)), [(3, None), (1, "cut")])
    events.trained(RolloutsOfStep(2, 0, (), ()), [(0, None), (2, None)])
    events.unused([(3, 1)], "the run ended")
    first, second, third = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    shared = {"engine": "hf", "prompts": 4}
    assert first.pop("trained") <= second.pop("trained")
    assert first == {
        **shared, "step": 1, "version": 0, "first": 0, "asked": [1.0], "began": [2.0], "ended": [3.0], "waited": 0.5,
        "rows": [3, 1], "left_out": {"cut": [1]},
    }  # fmt: skip
    assert second == {
        **shared, "step": 2, "version": 0, "first": 2, "waited": 0.0, "rows": [0, 2], "left_out": {}
    }  # fmt: skip
    assert third == {**shared, "step": 3, "version": 1, "first": 4, "unused": "the run ended"}
    RolloutEvents(None, "hf", 4, 2).unused([(3, 1)], "the run ended")  # other ranks write nothing


def test_lines_name_the_servers_of_all_ranks(tmp_path, monkeypatch):
    other = {"http://b:1": ServerShare(2, 3.0, 2.5), "http://a:1": ServerShare(0, 9.0, 9.0)}
    monkeypatch.setattr(rollouts, "gathered", lambda own: [own, other if isinstance(own, dict) else own])
    events = RolloutEvents(RunLog(tmp_path / "log"), "vllm_server", prompts=4, per_step=2)
    events.trained(RolloutsOfStep(1, 0, (), (), shares={"http://b:1": ServerShare(1, 0.5, 0.5)}), [(3, None)])
    events.trained(RolloutsOfStep(2, 0, (), ()), [(1, None)])
    first, second = [json.loads(line)["servers"] for line in (tmp_path / "log").read_text().splitlines()]
    assert first == {
        "http://a:1": {"responses": 0, "seconds": 9.0, "slowest": 9.0},
        "http://b:1": {"responses": 3, "seconds": 3.5, "slowest": 2.5},
    }
    assert second["http://b:1"]["responses"] == 2, "another rank may have drawn alone"


NUMBERS = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.5]


@pytest.mark.parametrize("first, second", list(itertools.combinations_with_replacement(range(8), 2)))
def test_any_split_over_ranks_gives_the_same(first, second):
    """Three ranks, some with none."""
    parts = [NUMBERS[:first], NUMBERS[first:second], NUMBERS[second:]]
    measure = Measure(torch.tensor(NUMBERS), {statistic: statistic for statistic in STATISTICS})
    own = [moments([Measure(torch.tensor(part), measure.shows)])[0] for part in parts]
    found = figures_of([measure], [reduce(Moments.joined, own, NOTHING)])
    squares = sum(each**2 for each in NUMBERS)
    assert found == pytest.approx(
        {
            "total": sum(NUMBERS),
            "mean": statistics.fmean(NUMBERS),
            "std": statistics.pstdev(NUMBERS),
            "min": -5.0,
            "max": 9.0,
            "ess": sum(NUMBERS) ** 2 / (7 * squares),
            "chi2": squares / 7 - 1,
        }
    )


def test_nothing_on_any_rank_has_no_figure():
    measures = [Measure(torch.empty(0), spread("a")), Measure(torch.tensor([True, False]), {"mean": "b"})]
    assert figures_of(measures, moments(measures)) == {"b": 0.5}


def test_a_spread_names_four():
    assert spread("x", mean="x") == {"mean": "x", "std": "x_std", "min": "x_min", "max": "x_max"}


def test_equal_numbers_have_no_deviation_by_rounding():
    measure = Measure(torch.full((1000,), 0.1), {"std": "std"})
    assert figures_of([measure], moments([measure]))["std"] == pytest.approx(0, abs=1e-8)
    assert not math.isnan(figures_of([measure], moments([measure]))["std"])


def test_a_small_spread_around_one_is_not_rounded_away():
    """The mean of 300,000 numbers near 1 added up in float32 is off by more than their deviation squared."""
    values = 1 + 1e-4 * torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    found = moments([Measure(values, {})])[0]
    assert STATISTICS["std"](found) == pytest.approx(float(values.double().std()), rel=1e-4)
