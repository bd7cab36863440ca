"""What an engine returns is checked column by column: missing, of another type, ragged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.utils.generation.decoding.test_hf import PLAIN
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Response, Rollout
from training.utils.contracts.rollout_engine import EngineWrapper, RolloutEngine, RolloutRequest, rolled_out

REQUEST = RolloutRequest(torch.ones(2, 3).long(), torch.ones(2, 3).bool(), PLAIN, [0, 1, 2, 3], samples_per_prompt=2)
GOOD = Rollout(
    prompt_ids_BP=torch.ones(4, 3).long(),
    prompt_mask_BP=torch.ones(4, 3).bool(),
    response_ids_BR=torch.ones(4, 5).long(),
    response_lengths_B=torch.tensor([1, 5, 2, 3]),
    sampled_logprobs_BR=torch.zeros(4, 5),
    ended_B=torch.ones(4).bool(),
)


class Mine(RolloutEngine):
    drawn = GOOD

    def roll_out(self, model, request):
        return self.drawn


def drawn(**changes) -> Rollout:
    engine = Mine()
    engine.drawn = replace(GOOD, **changes)
    return rolled_out(engine, None, REQUEST)


def test_an_engine_may_change_its_rows_and_use_its_memory_again():
    class Reusing(Mine):
        def roll_out(self, model, request):
            for row in request.rows:
                row["seen"] = row.get("seen", 0) + 1
            assert [row["seen"] for row in request.rows] == [1, 1]
            for tensor in (self.drawn.response_ids_BR, self.drawn.sampled_logprobs_BR):
                tensor += 1
            return self.drawn

    engine, row = Reusing(), {}
    engine.drawn = replace(GOOD, response_ids_BR=torch.ones(4, 5).long(), sampled_logprobs_BR=torch.zeros(4, 5))
    first, second = (rolled_out(engine, None, replace(REQUEST, rows=[row, row])) for _ in range(2))
    assert row == {} and first.response_ids_BR.unique().item() == 2 and second.response_ids_BR.unique().item() == 3
    assert first.sampled_logprobs_BR.unique().item() == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sampled_logprobs_BR": None}, r"Mine expects to return sampled_logprobs_BR as float32 \[4, 5\], .* got"),
        ({"ended_B": torch.ones(3).bool()}, r"ended_B as bool \[4\], one row for each of 4 sequences, got bool \[3\]"),
        ({"response_ids_BR": torch.ones(4, 5)}, r"response_ids_BR as int64 \[4, 5\], .* got float32 \[4, 5\]"),
        ({"response_ids_BR": torch.ones(4, 6).long()}, r"sampled_logprobs_BR as float32 \[4, 6\], .* float32 \[4, 5\]"),
        ({"response_ids_BR": [[1], [2, 3]]}, r"response_ids_BR as int64 \[4, R\], .* got list"),
        ({"prompt_mask_BP": torch.ones(2, 3).bool()}, r"prompt_mask_BP as bool \[4, 3\], .* got bool \[2, 3\]"),
        (
            {"response_lengths_B": torch.tensor([1, 0, 2, 3])},
            "from 1 to the 5 columns of response_ids_BR, got 0 for",
        ),
        ({"response_lengths_B": torch.tensor([1, 5, 6, 3])}, "got 6 for sequence 2"),
    ],
)
def test_a_column_that_is_missing_or_ragged_is_named(changes, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        drawn(**changes)


def test_responses_become_a_rollout():
    """Worked out by hand; two samples of one prompt."""
    prompts = (torch.tensor([[0, 7], [0, 7]]), torch.tensor([[False, True], [False, True]]))
    responses = [Response([4, 5, 6], [-0.5, -1.5, -2.5], True), Response([8], [-3.0], False)]
    rollout = Rollout.of_responses(prompts, responses, pad_token_id=9, seconds=2.0)
    assert rollout.response_ids_BR.tolist() == [[4, 5, 6], [8, 9, 9]] and rollout.response_lengths_B.tolist() == [3, 1]
    assert rollout.sampled_logprobs_BR.tolist() == [[-0.5, -1.5, -2.5], [-3.0, 0.0, 0.0]]
    assert rollout.ended_B.tolist() == [True, False] and rollout.seconds == 2.0
    request = replace(REQUEST, prompt_ids_BP=prompts[0][:1], prompt_mask_BP=prompts[1][:1], seeds=[0, 1])
    engine = Mine()
    engine.drawn = rollout
    assert torch.equal(rolled_out(engine, None, request).prompt_mask_BP, prompts[1])


class Whole:
    """A trained model whose weights are numbers."""

    model, is_sharded, updates = "model", False, 0

    def tensors(self):
        return iter([("a", torch.tensor(self.updates))])

    def send(self, take):
        take(self.tensors())


def test_weights_are_sent_when_they_have_changed():
    class Server(Mine):
        takes_weights = True

        def __init__(self):
            super().__init__()
            self.got = []

        def take_weights(self, model, tensors):
            self.got += [(model, name, int(tensor)) for name, tensor in tensors]

    server, actor = Server(), Whole()
    for updates in (0, 0, 1, 1, 2):
        actor.updates = updates
        with server.lent(actor) as model:
            assert model == "model"
    assert server.got == [("model", "a", 0), ("model", "a", 1), ("model", "a", 2)]


def test_a_wrapper_forwards_all_but_rollouts():
    """What is added to the contract is added to the wrapper, or it would be lost behind it in silence."""
    asked = {name for name, part in vars(RolloutEngine).items() if callable(part) and not name.startswith("_")}
    assert asked - vars(EngineWrapper).keys() == {"roll_out", "stream"}

    class Full(Mine):
        supports_media, takes_weights, longest_tokens = True, True, 64

        def figures(self):
            return {"seconds": 1.0}

    class Wrapped(EngineWrapper):
        def roll_out(self, model, request):
            return self._engine.roll_out(model, request)

    wrapped = Wrapped(Full())
    assert wrapped.supports_media and wrapped.takes_weights and wrapped.longest_tokens == 64
    assert wrapped.figures() == {"seconds": 1.0} and wrapped.roll_out(None, REQUEST) is GOOD
