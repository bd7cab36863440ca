"""After each of 20 updates vLLM's log-probabilities are those of the new weights, however these are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.vllm.tests.vllm.conftest import SHAPES
from threestep.plugins.vllm.tests.vllm.sync_program import BUCKET_ELEMENTS, CASES

UPDATES = 20


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def reports(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    tiny_causal_lm("qwen3", **SHAPES["qwen3"]).save_pretrained(folder)
    program = Path(__file__).with_name("sync_program.py")
    return run_ranks(program, request.param, [folder, UPDATES], timeout_seconds=840)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_follow_the_new_weights(reports, case):
    for report in reports:
        got = report[case]
        assert got["worst"] < 1e-4 < got["moved"], got
        assert got["sent"] == UPDATES, "sent once after each update"
        assert got["sent_again"] == 1, "and not again while nothing has changed"
        if CASES[case]["zero_stage"] == 3:
            # A bucket is full with the weight that fills it, and that one's adapters.
            assert 0 < got["most_gathered"] <= BUCKET_ELEMENTS + 2 * got["largest_weight"], got
