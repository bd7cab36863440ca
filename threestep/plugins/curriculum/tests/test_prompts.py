"""Which prompts are taken: saved and loaded sources go on alike, ranks agree, and users' mistakes are sentences."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from examples.curriculum import SureQuestions, WorstAgain
from tests.distributed.launch import run_ranks
from threestep.plugins.curriculum.arguments import CurriculumArguments
from threestep.plugins.curriculum.opening import chosen_prompts, open_prompts
from threestep.plugins.curriculum.prompts import EpochSampler, PromptDataset, PromptSampler, SampledPrompts
from training.step3_ppo.contracts.records import LeftOut, Samples, Scored
from training.step3_ppo.contracts.rollouts import PromptSource
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rows import PromptRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.order import ShuffledStream

pytestmark = pytest.mark.unit

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
END = 9


def rows(count):
    return [PromptRow(i, np.array([i + 10], np.int32), f"prompt {i}", str(i)) for i in range(count)]


class Maker:
    """A PromptMaker without a tokenizer."""

    def make(self, prompt, ground_truth, row_id, **columns):
        return None if prompt == "bad" else PromptRow(row_id, np.zeros(1, np.int32), prompt, ground_truth, columns)


def seen(rows, scores, responses=None):
    """Responses of one token and the end token, or those given."""
    responses = responses or [[3, END]] * len(scores)
    width = max(map(len, responses))
    nothing_BR = torch.zeros(len(scores), width)
    rollout = Rollout(
        prompt_ids_BP=torch.zeros(len(scores), 1, dtype=torch.int64),
        prompt_mask_BP=torch.ones(len(scores), 1, dtype=torch.bool),
        response_ids_BR=torch.tensor([ids + [0] * (width - len(ids)) for ids in responses]),
        response_lengths_B=torch.tensor([len(ids) for ids in responses]),
        sampled_logprobs_BR=nothing_BR,
        ended_B=torch.tensor([ids[-1] == END for ids in responses]),
    )
    scores_B = torch.tensor(scores)
    return Samples(tuple(rows), rollout, lambda: Scored(scores_B, scores_B, {}))


def texts_of(rollout):
    return rollout.texts(lambda ids: " " + " ".join(map(str, ids.tolist())), {END})


def source_of(kinds, prompts):
    """A fresh source: `kinds` are a sampler's class and a dataset's, or None."""
    sampler_class, dataset_class = kinds
    dataset = None if dataset_class is None else dataset_class(prompts, Maker(), 5)
    offered = prompts if dataset is None else dataset
    return SampledPrompts(offered, (sampler_class or EpochSampler)(offered, 5), dataset, texts_of, ALONE)


def run(source, begin, steps, count=3):
    """The texts of the prompts of some steps, each told of scores that depend on its prompts and its number."""
    taken = []
    for step in range(begin, begin + steps):
        asked = source.take(step * count, count)
        taken.append([row.prompt_text for row in asked])
        source.observe(seen(asked, [float(len(row.uid * step) % 7) for row in asked]))
    return taken


class AtRandom(PromptSampler):
    """Draws from a stream of its own, whose whole state it keeps."""

    def __init__(self, prompts, seed):
        super().__init__(prompts, seed)
        self.random = random.Random(seed)
        self.seen = []

    def take(self, first, count):
        return [self.random.randrange(len(self.prompts)) for _ in range(count)]

    def update(self, uids, scores):
        self.seen.append([list(uids), list(scores)])
        self.random.random()

    def state_dict(self):
        version, numbers, gauss = self.random.getstate()
        return {"random": [version, list(numbers), gauss], "seen": self.seen}

    def load_state_dict(self, state):
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
        self.seen = state["seen"]


@pytest.mark.parametrize(
    "kinds",
    [(None, SureQuestions), *((kind, data) for kind in (WorstAgain, AtRandom) for data in (None, SureQuestions))],
    ids=lambda kinds: "+".join(kind.__name__ for kind in kinds if kind),
)
@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_loaded_state_goes_on_with_the_very_same_prompts(kinds, stop):
    whole = run(source_of(kinds, rows(7)), 0, 11)
    first = source_of(kinds, rows(7))
    before = run(first, 0, stop)
    state = json.loads(json.dumps(first.state_dict()))
    fresh = source_of(kinds, rows(7))
    fresh.load_state_dict(state)
    assert before + run(fresh, stop, 11 - stop) == whole
    if kinds[1] is not None:
        assert any("Are you sure?" in text for texts in whole for text in texts)


def test_an_epoch_is_over_the_prompts_that_were_there_when_it_began():
    prompts = rows(4)
    sampler = EpochSampler(prompts, seed=5)
    assert sampler.take(0, 6) == ShuffledStream(4, 5).take(0, 6)
    prompts += rows(6)[4:]  # in the middle of the second epoch
    assert sampler.take(6, 2) == ShuffledStream(4, 5).take(6, 2)
    third = sampler.take(8, 6)
    assert sorted(third) == [0, 1, 2, 3, 4, 5]
    del prompts[3:]
    assert sorted(sampler.take(14, 3)) == [0, 1, 2]


def test_what_a_dataset_is_told():
    """What it changes of that is its own."""
    told = []

    class Sorts(AtRandom):
        def update(self, uids, scores):
            super().update(list(uids), list(scores))
            uids.sort()
            scores.sort()

    class Marks(PromptDataset):
        def on_batch_end(self, results):
            told.append((results, list(results.scores)))
            for row in results.rows:
                row.columns["seen"] = row.columns.get("seen", 0) + 1
            message = {"role": "user", "content": "again"}
            tags = ["x"]
            self.add([message], tags=tags)
            message["content"], tags[0] = "other", "y"

    source, asked, scores = source_of((Sorts, Marks), rows(2)), rows(2), [4.0, 2.0, 3.0, 1.0]
    source.observe(seen(asked, scores, [[3, END], [4, 5, 6], [END], [7, 8, END]]))
    ((results, given),) = told
    assert [row.uid for row in results.rows] == [row.uid for row in asked for _ in range(2)]  # two responses a prompt
    assert len({id(row) for row in [*results.rows, *asked]}) == 6  # each is the dataset's own
    assert results.responses == [" 3", " 4 5 6", " ", " 7 8"] and given == scores
    assert [row.columns for row in asked] == [{}, {}]
    assert source.state_dict()["sampler"]["seen"] == [[[row.uid for row in results.rows], scores]]
    assert source.state_dict()["dataset"]["added"] == [
        {"prompt": [{"role": "user", "content": "again"}], "ground_truth": None, "tags": ["x"]}
    ]


def test_what_is_left_out_is_told_after_what_is_trained_on():
    source, asked = source_of((AtRandom, None), rows(4)), rows(4)
    later, sooner = ((1, 0, 1), (0, 1, 0)), ((0, 0, 0),)
    left_out = [
        LeftOut(keys, tuple(asked[place] for place in places), seen((), scores).rollout, torch.tensor(scores))
        for keys, places, scores in ((later, (2, 3), [7.0, 8.0]), (sooner, (1,), [9.0]))
    ]
    source.observe(seen(asked[:1], [1.0]), left_out)
    ((uids, scores),) = source.state_dict()["sampler"]["seen"]
    assert scores == [1.0, 9.0, 8.0, 7.0] and uids == [asked[place].uid for place in (0, 1, 3, 2)]


def test_prompts_that_are_added():
    dataset = PromptDataset(rows(3), Maker(), seed=1)
    assert dataset.add("more", ground_truth="x", level=2) and not dataset.add("bad")
    assert len(dataset) == 4 and [row.row_id for row in dataset] == [0, 1, 2, -1]
    assert dataset[-1].columns == {"level": 2} and [row.reference for row in dataset[2:]] == ["2", "x"]
    with pytest.raises(IndexError):
        dataset[4]
    again = PromptDataset(rows(3), Maker(), seed=1)
    again.add("forgotten")
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert [row.uid for row in again] == [row.uid for row in dataset]


TWO_RANKS = """
import random
import numpy as np
import torch
import torch.distributed as dist
from tests.distributed.launch import report
from threestep.plugins.curriculum.tests.test_prompts import AtRandom, Maker, rows, seen, texts_of
from threestep.plugins.curriculum.prompts import SampledPrompts, PromptDataset
from training.utils.data.rows.documents import collate_prompts
from training.utils.engine.ranks.startup import Ranks
from training.utils.base.errors import ThreestepError

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = Ranks(rank, rank, 2, torch.device("cpu"))

class Grows(PromptDataset):
    def on_batch_end(self, results):
        self.add(f"new {random.random()}", results.responses[0])
        if len(self) == 9:
            raise ValueError("nine")

prompts = rows(6)
dataset = Grows(prompts, Maker(), 1)
source = SampledPrompts(dataset, AtRandom(dataset, seed=rank), dataset, texts_of, ranks)
taken, mistake = [], None
try:
    for step in range(4):
        asked = source.take(4 * step, 4)
        taken.append([row.prompt_text for row in asked])
        mine = asked[rank::2]
        source.observe(seen(mine, [10.0 * step + rank, 10.0 * step + 2 + rank]))
        state = source.state_dict()
except ThreestepError as error:
    mistake = str(error)
source.load_state_dict(state)
report({"taken": taken, "state": state, "mistake": mistake, "after": [row.prompt_text for row in source.take(16, 4)]})
dist.destroy_process_group()
"""


def test_two_ranks_see_the_same():
    """Also where the user's code draws at random: the second rank's own sampler has another seed."""
    first, second = run_ranks(TWO_RANKS)
    assert first == second
    assert len(first["taken"]) == 3 and first["mistake"] is not None
    assert "Grows.on_batch_end raised ValueError: nine (script.py, line" in first["mistake"]
    seen = first["state"]["sampler"]["seen"]
    assert [scores for _, scores in seen] == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    texts = {row.uid: row.prompt_text for row in rows(6)}
    for uids, asked in zip([uids for uids, _ in seen], first["taken"], strict=False):
        assert [texts[uid] for uid in uids if uid in texts] == [text for text in asked if "new" not in text]
    assert len(first["state"]["dataset"]["added"]) == 2


# --- mistakes


@pytest.mark.parametrize("chosen", [[0, 1], [0, 1, 7], [0, -1, 1], [0.5, 1, 2], None, "abc", np.arange(3)])
def test_indices_that_do_not_fit(chosen):
    source = source_of((AtRandom, None), rows(7))
    source.sampler.take = lambda first, count: chosen
    with pytest.raises(ThreestepError, match=r"AtRandom.take\(0, 3\): expected a list of 3 indices from 0 to 6, got "):
        source.take(0, 3)


@pytest.mark.parametrize("state", [{1: "a"}, {"a": (1, 2)}, {"a": float("nan")}, {"a": {1}}])
def test_a_state_that_json_does_not_keep(state):
    source = source_of((AtRandom, None), rows(7))
    source.sampler.state_dict = lambda: state
    with pytest.raises(ThreestepError, match="AtRandom.state_dict must return a dict that JSON restores unchanged"):
        source.state_dict()


def test_a_state_of_another_kind_of_source():
    state = source_of((AtRandom, SureQuestions), rows(7)).state_dict()
    with pytest.raises(ThreestepError, match="with a dataset and a sampler, but this run uses them in"):
        PromptSource(rows(7), 5).load_state_dict(state)
    words = "with neither --prompt_sampler nor --prompt_dataset, but this run uses a sampler; use the saved"
    with pytest.raises(ThreestepError, match=words):
        source_of((AtRandom, None), rows(7)).load_state_dict({})


OWN = """
from threestep.plugins.curriculum.prompts import PromptDataset, PromptSampler
class InOrder(PromptSampler):
    def take(self, first, count):
        return [position % len(self.prompts) for position in range(first, first + count)]
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass
class Half(PromptSampler):
    def take(self, first, count):
        return []
class Broken(InOrder):
    def __init__(self, prompts, seed):
        raise KeyError("here")
class Doubled(PromptDataset):
    def __len__(self):
        return 2 * len(self.prompts)
    def __getitem__(self, index):
        return self.prompts[index % len(self.prompts)]
def function():
    pass
"""


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def open_source(sampler=None, dataset=None, shuffled=True):
        named = CurriculumArguments(*(name and f"{tmp_path}/own.py:{name}" for name in (sampler, dataset)))
        if not shuffled:
            flags = SimpleNamespace(run=SimpleNamespace(shuffle=False))
            return open_prompts(flags, rows(3), None, texts_of, ranks=ALONE)
        return chosen_prompts(rows(3), named, Maker, texts_of=texts_of, seed=5, ranks=ALONE)

    return open_source


@pytest.mark.parametrize("names", [("InOrder",), (None, "Doubled")])
def test_classes_from_the_users_file(opened, names):
    assert [row.row_id for row in opened("InOrder").take(2, 3)] == [2, 0, 1]
    assert sorted(row.row_id for row in opened(None, "Doubled").take(0, 6)) == [0, 0, 1, 1, 2, 2]
    assert opened("InOrder", "Doubled").take(4, 1)[0].row_id == 1
    with pytest.raises(
        ThreestepError, match="--shuffle false uses the prompts in the order of the data, but --prompt_sam"
    ):
        opened(*names, shuffled=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("function",), "^--prompt_sampler: '.*own.py:function' is not a subclass of threestep.*PromptSampler$"),
        (("Doubled",), "^--prompt_sampler: .*is not a subclass of .*curriculum.prompts.PromptSampler$"),
        ((None, "InOrder"), "^--prompt_dataset: .*is not a subclass of .*curriculum.prompts.PromptDataset$"),
        (("Half",), "^--prompt_sampler: '.*own.py:Half' must define load_state_dict, state_dict$"),
        (("Broken",), "^Broken raised KeyError: 'here' .own.py, line 15.$"),
        (("Missing",), "^--prompt_sampler: '.*own.py' has no 'Missing'"),
    ],
)
def test_other_things_in_the_users_file(opened, given, said):
    with pytest.raises(ThreestepError, match=said):
        opened(*given)
