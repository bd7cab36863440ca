"""A run's files as the account of its reward and the curve against the KL."""

from __future__ import annotations

import json
import math

import pytest

from threestep.plugins.report.figures.gaming_figures import gaming_of
from threestep.plugins.report.figures.reading import read_runs


def lines_of(kls: list[float], evaluations: dict[int, tuple[float, float]]) -> list[dict]:
    lines = [{"step": step, "rollout/kl": kl} for step, kl in enumerate(kls, start=1)]
    lines += [{"step": at, "eval/reward": reward, "eval/check": check} for at, (reward, check) in evaluations.items()]
    return sorted(lines, key=lambda line: line["step"])


@pytest.fixture
def figures_of(ppo_run):
    def make(lines: list[dict], settings: str):
        folder = ppo_run(
            samples=[
                {"step": step, "prompt_index": index, "sample": 0, "prompt": "p", "response": "r " * (index + step),
                 "response_tokens": index + step, "reward": index + step, "check": 1.0 - 0.25 * (step > 0)}
                for step in (0, 4) for index in range(40)
            ]
        )  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(f"program: training.step3_ppo.main\n{settings}")
        return gaming_of(read_runs([folder])[0].steps[0])

    return make


def test_the_curve_stands_over_the_square_root_of_the_next_rollouts_kl(figures_of):
    """The weights after step 2 drew rollout 3; after the last rollout its own KL stands."""
    lines = lines_of([0.0, 0.04, 0.16, 0.25], {0: (1.0, 0.5), 2: (3.0, 0.75), 4: (5.0, 0.25)})
    found = figures_of(lines, "reward: model\nchecker: gsm8k\n")
    score, check = found.curve.lines
    assert [x for x, _ in score.points] == pytest.approx([0.0, 0.4, 0.5]) and found.kl == 0.25
    deviation = found.account.score.deviation
    assert [y for _, y in score.points] == pytest.approx([0.0, 2.0 / deviation, 4.0 / deviation])
    assert (score.label, check.label, check.is_evaluation) == ("score", "checker, held out", True)
    assert "square root of the KL" in found.curve.x_label
    assert any("while checker, which is not trained on, fell by 0.25" in sign for sign in found.signs)


def test_a_kl_that_is_not_monotonic_or_below_0(figures_of):
    lines = lines_of([-0.01, 0.3, 0.2, 0.1], {0: (1.0, 0.5), 1: (2.0, 0.5), 4: (3.0, 0.5)})
    found = figures_of(lines, "reward: model\nchecker: gsm8k\n")
    assert [x for x, _ in found.curve.lines[0].points] == pytest.approx([0.0, math.sqrt(0.1), math.sqrt(0.3)])


def test_without_a_reference_it_stands_over_the_steps(figures_of):
    lines = [line for line in lines_of([], {0: (1.0, 0.5), 2: (2.0, 0.5), 4: (3.0, 0.5)}) if "rollout/kl" not in line]
    found = figures_of(lines, "reward: model\n")
    assert found.kl is None and found.curve.x_label == "step"
    assert [line.label for line in found.curve.lines] == ["score"]
    assert [x for x, _ in found.curve.lines[0].points] == [0.0, 2.0, 4.0]
    assert found.signs and found.signs[0].endswith("and nothing held out checks it")


def test_two_evaluations_are_no_curve(figures_of):
    assert figures_of(lines_of([0.0], {0: (1.0, 0.5), 4: (5.0, 0.25)}), "reward: model\n").curve is None


def test_other_steps_have_none(sft_run):
    assert gaming_of(read_runs([sft_run()])[0].steps[0]) is None
