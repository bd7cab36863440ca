"""Guests and observers of steps: none changes nothing, and several act in the order of their tuple. Rows count their
tokens, trackers are given names and tables, and what a rollout engine returns is checked column by column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.utils.generation.decoding.test_hf import PLAIN
from training.utils.base.errors import ThreestepError
from training.utils.contracts.guests import Guest, Guests, GuestStep
from training.utils.contracts.rollout import Response, Rollout
from training.utils.contracts.rollout_engine import EngineWrapper, RolloutEngine, RolloutRequest, rolled_out
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow, TextBlock
from training.utils.contracts.run import NOT_OBSERVED, ObservedStep, StepObserver, StepObservers, StepTaken
from training.utils.contracts.trackers import TrackedRun, sample_table


class Named(Guest):
    """Answers everything with its name."""

    def __init__(self, name: str, needs_before: bool = False, guesses: bool = False) -> None:
        self.name, self.needs_before, self.guesses = name, needs_before, guesses

    @property
    def engines(self):
        return {self.name: self}

    def prepare(self, rows):
        return self.name, rows

    def tally(self, documents):
        return self.name, len(documents)

    def forward_kwargs(self, prepared):
        return {self.name: prepared}

    def evaluate(self, read, prepared):
        return {f"{self.name}_sum": torch.tensor(1.0)}

    def evaluated(self, group, totals):
        return {f"{group}/{self.name}": totals[f"{self.name}_sum"]}

    def model_writer(self):
        return lambda folder: folder.append(self.name)

    def lent_guesser(self, model, seed):
        return (lambda: self.name) if self.guesses else None


def test_no_guest_changes_nothing():
    none = Guests()
    assert not none and not none.needs_before and none.engines == {} and none.prepare("rows") == ()
    assert none.forward_kwargs(()) == {} and none.evaluate("read", ()) == {} and none.evaluated("eval", {}) == {}
    assert none.model_writer() is None and none.lent_guesser(None, 0) is None
    guest, step = Guest(), GuestStep()
    assert Guests([guest]).engines == {} and guest.prepare("rows") is None and guest.tally([]) is None
    assert guest.forward_kwargs(None) == {} and guest.evaluate("read", None) == {} and guest.evaluated("eval", {}) == {}
    assert Guests([guest]).model_writer() is None and guest.lent_guesser(None, 0) is None and not guest.why_not_ahead
    assert isinstance(guest.begin([], print, None), GuestStep)
    assert step.sums == {} and step.loss_part("rows", "read") == 0.0 and step.end("train", {}) == {}


def test_several_guests_act_in_their_order():
    guests = Guests([Named("b"), Named("a", needs_before=True, guesses=True)])
    assert guests.needs_before and list(guests.engines) == ["b", "a"]
    prepared = guests.prepare("rows")
    assert prepared == (("b", "rows"), ("a", "rows")) and guests.tally(["one"]) == (("b", 1), ("a", 1))
    assert guests.forward_kwargs(prepared) == {"b": ("b", "rows"), "a": ("a", "rows")}
    totals = {name: float(value) for name, value in guests.evaluate("read", prepared).items()}
    assert guests.evaluated("eval", totals) == {"eval/b": 1.0, "eval/a": 1.0}
    written: list[str] = []
    guests.model_writer()(written)
    assert written == ["b", "a"] and guests.lent_guesser(None, 0)() == "a"


class Observer(StepObserver):
    """Wraps what is trained in its name, and notes what it sees."""

    def __init__(self, name: str, seen: list[tuple[object, ...]]) -> None:
        self.name, self.seen = name, seen

    def begin(self, number, update=None):
        self.seen.append((self.name, number, update))
        return Seen(self)


class Seen(ObservedStep):
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def watched(self, trainee):
        return f"{self.observer.name}({trainee})"

    def taken(self, step):
        self.observer.seen.append((self.observer.name, step.figures))


STEP = StepTaken(3, {"loss": 1.0}, lambda: [7, 8], update=2)


def test_several_observers_see_a_step_in_their_order():
    seen: list[tuple[object, ...]] = []
    observed = StepObservers([Observer("b", seen), StepObserver(), Observer("a", seen)]).begin(3, 2)
    assert observed.watched("model") == "a(b(model))"
    observed.taken(STEP)
    assert seen == [("b", 3, 2), ("a", 3, 2), ("b", {"loss": 1.0}), ("a", {"loss": 1.0})]
    assert (STEP.kind, STEP.number, STEP.update, [*STEP.row_ids()]) == ("", 3, 2, [7, 8])
    assert StepObservers().begin(3) is NOT_OBSERVED is StepObserver().begin(3, 1)
    assert NOT_OBSERVED.watched(seen) is seen


def test_lengths_count_every_token():
    ids = np.arange(4, dtype=np.int32)
    rows = (SentenceRow(0, ids, ids > 1), PromptRow(0, ids, "", None), TextBlock(0, ids))
    assert [row.length_tokens for row in rows] == [4, 4, 4]
    assert ResponsesRow(0, ids, (ids[:1], ids[:3])).length_tokens == 8


def test_a_prompts_uid_is_of_its_text_and_reference_alone():
    def uid(text, reference=None, row_id=0, **columns):
        return PromptRow(row_id, np.arange(4, dtype=np.int32), text, reference, columns).uid

    assert uid("a", "1") == uid("a", "1", 7, data_source="x") and len(uid("a")) == 16
    assert len({uid("a"), uid("b"), uid("a", "1"), uid("a", 1), uid("a", [1])}) == 5
    assert uid("a", {"x": 1, "y": 2}) == uid("a", {"y": 2, "x": 1})
    # Written down once: what a saved sampler knows by uid must be found again by later releases.
    assert uid("Human: 2 + 3? Assistant:", "5") == "1641188edb45732e"


def test_the_table_of_samples():
    """Columns that some sample has, then each reward's; JSON stands for what is neither number nor text."""
    first = {"prompt": "p", "response": "r", "reward": 1.0, "sample": 0, "ground_truth": ["a"], "reward/rule": 1.0}
    samples = [
        {**first, "step": 3},
        {"prompt": "p", "response": "s", "reward": 0.5, "sample": 1, "ground_truth": None, "reward/rule/key": 2.0},
        {"prompt": "q", "response": "t", "reward": 0.0, "sample": 0, "check": 1.0},
    ]
    columns, rows = sample_table(samples, 2)
    assert columns == ["prompt", "sample", "response", "ground_truth", "reward", "reward/rule", "reward/rule/key"]
    assert rows == [["p", 0, "r", '["a"]', 1.0, 1.0, None], ["p", 1, "s", None, 0.5, None, 2.0]]
    assert "check" in sample_table(samples, 3)[0] and sample_table([], 8) == ([], [])
    assert TrackedRun(Path("runs/quickstart/sft"), {"run_name": None}, 8).name == "quickstart/sft"
    assert TrackedRun(Path("runs/sft"), {"run_name": "mine"}, 8).name == "mine"


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
        ({"sampled_logprobs_BR": None}, r"Mine must return sampled_logprobs_BR as float32 \[4, 5\], .* got"),
        (
            {"ended_B": torch.ones(3).bool()},
            r"ended_B as bool \[4\], with one row for each of 4 sequences, got bool \[3\]",
        ),
        ({"response_ids_BR": torch.ones(4, 5)}, r"response_ids_BR as int64 \[4, 5\], .* got float32 \[4, 5\]"),
        ({"response_ids_BR": torch.ones(4, 6).long()}, r"sampled_logprobs_BR as float32 \[4, 6\], .* float32 \[4, 5\]"),
        ({"response_ids_BR": [[1], [2, 3]]}, r"response_ids_BR as int64 \[4, R\], .* got list"),
        ({"prompt_mask_BP": torch.ones(2, 3).bool()}, r"prompt_mask_BP as bool \[4, 3\], .* got bool \[2, 3\]"),
        (
            {"response_lengths_B": torch.tensor([1, 0, 2, 3])},
            "between 1 and 5, the columns of response_ids_BR, got 0 for",
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
