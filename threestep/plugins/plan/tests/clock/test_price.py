"""Hours and money by hand."""

from __future__ import annotations

from threestep.plugins.plan.clock.price import Bill, time_lines


def test_hours_and_money_of_a_run():
    table, hours, error = time_lines({"matmuls": 3.0, "optimizer": 0.6}, "h100", Bill(2000, "step", 64, 2.5))
    assert "one step" in table and "3.6000" in table
    assert hours == "2,000 steps: 2.00 hours, 128.0 of devices, 320.00 in money at 2.5 an hour and rank"
    assert "30 %" in error and "steps of RL" not in error
    of_rollouts = time_lines({"decode": 1.0}, "h100", Bill(2, "rollout", 1, None))[2]
    assert "5 of 18 whole steps of RL; the others took longer" in of_rollouts


def test_without_a_bound_it_is_of_a_thousand():
    hours = time_lines({"matmuls": 3.6}, "h100", Bill(None, "rollout", 1, None))[1]
    assert hours == "1,000 rollouts: 1.00 hours, 1.0 of devices; --max_train_steps gives those of the run"
