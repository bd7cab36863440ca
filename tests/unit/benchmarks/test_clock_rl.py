"""Published steps of RL: rows, lengths that fall off, the weights that a mixture reads."""

from __future__ import annotations

import math

import pytest

from benchmarks.clock import rl_predicted
from benchmarks.clock.rl_rows import RolloutRow, published_rollouts

SMALL = RolloutRow("N", "h100", "opt-350m", 16, 2048, (150, 1060, 4096), 4, 1, (1, 2, 1), 10.0)


def test_rows_are_read():
    rows = published_rollouts()
    assert len(rows) == 18 and {row.source for row in rows} == set("ND")
    assert rows[0].name == "N h100 x 16, llama3-8b, 2048 x 1060 of 4096" and not rows[0].is_ppo
    assert (rows[0].split, rows[0].updates, rows[0].seconds) == ((1, 2, 1), 4, 97.7)
    assert rows[7].is_ppo and rows[7].seconds == pytest.approx(4.1 * 3600 / 129, abs=0.1)


def test_responses_end_so_that_their_mean_is_the_published_one():
    """The mean of min(X, longest) is the integral of the share that goes on."""
    steps = 20_000
    mean = sum(rl_predicted.going_on(910, 3946, 3946 * (step + 0.5) / steps) for step in range(steps)) * 3946 / steps
    assert mean == pytest.approx(910, rel=1e-3)
    assert rl_predicted.going_on(256, 256, 255) == 1.0


def test_a_step_has_all_parts():
    parts = rl_predicted.rollout_parts_of(SMALL, 0.85)
    assert {"prefill", "decode", "weights to the rollout", "scores", "actor: matmuls"} <= set(parts)
    assert "critic" not in parts and "sums between ranks that draw together" not in parts
    ppo = rl_predicted.rollout_parts_of(SMALL._replace(source="D", drawing=2, split=(1, 1, 1)), 0.85)
    assert {"critic", "sums between ranks that draw together", "actor: recomputation"} <= set(ppo)


def test_a_pipeline_waits_for_its_first_and_last_parts():
    """2,048 rows of 1,060 in 4 updates on 8 pipelines are 17 rows of 4,096 each."""
    assert rl_predicted._micro_steps(SMALL) == 17 and rl_predicted._bubble(SMALL) == pytest.approx(1 + 1 / 17)


def test_few_sequences_read_few_experts():
    row = SMALL._replace(model="qwen3-30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    one, all_of_them = (rl_predicted._read_weights(row, sequences) for sequences in (1.0, math.inf))
    assert all_of_them - one == pytest.approx((1 - 8 / 128) * experts)
    assert all_of_them == rl_predicted._weights(row.model) == pytest.approx(30.5e9, rel=0.01)


def test_copies_are_shared_until_their_weights_leave_room():
    rows = {row.model: row for row in published_rollouts() if (row.device, row.gpus) == ("a100", 8)}
    assert [rl_predicted.drawing_gpus(row) for row in rows.values()] == [1, 1, 2, 8]
