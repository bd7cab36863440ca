"""Step 2's report and score scale, of the chain."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.conftest import Chain

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.fixture(scope="module")
def chain(chain_named) -> Chain:
    return chain_named("alone")


@pytest.fixture(scope="module")
def report(chain: Chain) -> dict:
    return json.loads((chain.folders[2] / "reward_report.json").read_text())


def test_the_report_is_the_last_evaluation(chain: Chain, report: dict):
    lines = [json.loads(line) for line in (chain.folders[2] / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval/accuracy" in line][-1]
    told = report["evaluation"]
    assert told["pairs"] == told["prompts"] == 12 and told["accuracy"] == last["eval/accuracy"]
    assert told["chosen"]["mean"] == last["eval/chosen_mean"] and told["rejected"]["count"] == 12
    assert told["chosen"]["percentiles"]["p50"] == last["eval/chosen_p50"]
    assert sum(told["histogram"]["chosen"]) == sum(one["pairs"] for one in told["by_length"]) == 12
    assert report["before"]["score_gap"] != told["score_gap"]


def test_the_scale_is_in_the_models_configuration_and_not_in_the_critics(chain: Chain, report: dict):
    config = json.loads((chain.folders[2] / "model" / "config.json").read_text())
    assert config["threestep_score_mean"] == report["training_chosen"]["mean"]
    assert config["threestep_score_std"] == report["training_chosen"]["std"] > 0
    assert report["training_chosen"]["count"] == 16  # all rows of step 2
    assert "threestep_score_mean" not in (chain.folders[3] / "critic" / "config.json").read_text()
