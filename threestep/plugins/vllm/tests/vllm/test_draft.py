"""vLLM drafts with the head that is trained: its weights arrive after every update, and tokens stay the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from threestep.plugins.mtp.folder import save_head
from threestep.plugins.vllm.tests.vllm.draft_program import UPDATES
from threestep.plugins.vllm.tests.vllm.test_mtp import trained

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    model, head, _ = trained("llama", final_norm=True, tie_word_embeddings=True)
    model.save_pretrained(folder)
    save_head(folder, 1, dict(head.state_dict()))
    (report,) = run_ranks(Path(__file__).with_name("draft_program.py"), 1, [folder], timeout_seconds=840)
    print(report)
    return report


def test_after_each_update_the_draft_is_the_trained_head(found):
    assert len(found["updates"]) == UPDATES
    for update in found["updates"]:  # bit sums of all its weights were compared as well
        draft = dict(update["draft"])
        moved = draft.pop("moved")
        assert set(draft.values()) == {0.0}, draft
        assert update is found["updates"][0] or moved > 1e-3


def test_drafts_are_accepted_and_counted(found):
    assert found["updates"][0]["rollout/guesses_accepted"] > 0.7  # the head knows these responses by heart
    for update in found["updates"]:
        assert 0 < update["sampled"] < 1
        assert update["rollout/tokens_per_forward"] == pytest.approx(1 + update["rollout/guesses_accepted"])


def test_greedy_responses_and_log_probabilities_are_the_models(found):
    for update in found["updates"]:
        assert update["same"] and update["worst"] < 1e-4
    assert found["bad_words"] and found["stop"] and found["end"]


def test_sampled_tokens_are_drawn_as_often_as_they_are_likely(found):
    assert max(found["verified"]) < 5
