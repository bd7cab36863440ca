"""What samples give a phase: responses, margins, marks, references and columns; and the mistakes of a dataset class."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import with_flags
from tests.support.pair_rows import PAIR, Own
from tests.support.said import assistant, user
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PHASES
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.samples import prompt_of_sentences
from training.utils.data.kinds.table import KINDS, kind_of


def test_what_a_prompt_carries(build, flags):
    rows = [
        {"prompt": "a", "data_source": "sums", "ability": "math", "extra_info": {"index": 4}, "ground_truth": "5"},
        {"prompt": "b", "reward_model": {"style": "rule", "ground_truth": 7}, "level": None},
    ]
    built = build(3, rows)
    first, second = built.train
    assert (first.reference, second.reference) == ("5", 7)
    assert first.columns == {"data_source": "sums", "ability": "math", "extra_info": {"index": 4}, "index": 4}
    assert second.columns == {"data_source": flags(rows).source.data_path[0], "reward_model": {"style": "rule"}}
    counted = {"data_source": 2, "ability": 1, "extra_info": 1, "index": 1, "reward_model": 1}
    assert built.report.train.columns == counted and built.report.eval.columns == {}
    again = build(3, rows)
    assert again.report.from_cache and again.report.train.columns == counted
    assert [row.uid for row in again.train] == [row.uid for row in built.train]
    # what a flag names is the reference also beside a ground truth
    (row,) = build(3, [{"prompt": "a", "solution": "5", "ground_truth": "6"}], reference_column="solution").train
    assert row.reference == "5" and "ground_truth" not in row.columns and "solution" not in row.columns


ASKED = {
    "data_split": "0,0,1",
    "eval_fraction": 0.0,
    "prompt_style": "chat_template",
    "chat_template": "examples/environments/template.jinja",
    "return_columns": ["raw_prompt"],
}


@pytest.mark.parametrize(
    ("getter", "value", "said"),
    [
        ("get_extra", ["x"], "expected a dict of values by name, or None, got list"),
        ("get_extra", {"x": {1}}, "expected a value that JSON can represent: .*set"),
        (
            "get_prompt_messages",
            [{"role": "user", "content": "a", "picture": {1}}],
            "a value that JSON can represent: .*set",
        ),
    ],
)
def test_what_a_prompt_cannot_carry(own, build, tiny_tokenizer, getter, value, said):
    data = own(
        **{**ASKED, "prompt_style": "human_assistant", "chat_template": None, getter: lambda self, sample: value}
    )
    with pytest.raises(ThreestepError, match=rf"row \d+: Own.{getter}: .*{said}"):
        build_phase(3, data, tiny_tokenizer, seed=1)
    with pytest.raises(ThreestepError, match="row 0: 'responses' cannot be a column name in .*; rename the column"):
        build(3, [{"prompt": "a", "responses": "b"}])  # of a reward's argument


def test_a_class_may_use_its_objects_again(own, tiny_tokenizer):
    said, carried, truth = [], {"notes": []}, {}

    def prompt_messages(self, sample):
        said[:] = [{"role": "user", "content": sample["p"]}]
        return said

    def extra(self, sample):
        carried["notes"][:] = [sample["p"]]
        return carried

    def reference(self, sample):
        truth["is"] = sample["p"]
        return truth

    getters = {"get_prompt_messages": prompt_messages, "get_extra": extra, "get_reference": reference}
    rows = build_phase(3, own(rows=[{"p": "a"}, {"p": "b"}], **getters, **ASKED), tiny_tokenizer, seed=1).train
    assert [row.columns["notes"] for row in rows] == [["a"], ["b"]]
    assert [row.reference["is"] for row in rows] == ["a", "b"]
    assert [row.columns["raw_prompt"][0]["content"] for row in rows] == ["a", "b"]


def test_getters_may_change_the_sample(own, tiny_tokenizer):
    """Rows in memory are read once for each build: a getter that adds a message to its sample adds one."""
    rows = [{"p": text, "messages": [{"role": "user", "content": text}]} for text in "ab"]

    def prompt_messages(self, sample):
        sample["messages"].insert(0, {"role": "system", "content": "be brief"})
        return sample["messages"]

    for _ in range(2):
        data = own(rows=rows, get_prompt_messages=prompt_messages, rebuild_cache=True, **ASKED)
        found = build_phase(3, data, tiny_tokenizer, seed=1).train
        assert [len(row.columns["raw_prompt"]) for row in found] == [2, 2]


@pytest.mark.parametrize(
    ("given", "margins"), [(0.5, [0.5, 0.5]), ([1, 2.5], [1.0, 2.5]), (np.float32(3), [3.0, 3.0]), (None, None)]
)
def test_margins_between_ranked_responses(own, tiny_tokenizer, given, margins):
    responses = [" best", " good", " bad"]
    data = own(get_responses=lambda self, sample: responses, get_margin=lambda self, sample: given)
    for row in build_phase(2, with_flags(data, rebuild_cache=True), tiny_tokenizer, 1).train:
        assert (row.margins if margins is None else row.margins.tolist()) == margins
        assert [tiny_tokenizer.decode(ids[:-1]) for ids in row.response_ids] == responses


def test_margins_of_a_column(build):
    """Each with its row, also where a row between is left out; a row without one has None; one more build."""
    rows = [{**PAIR, "prompt": f"Human: {i}? Assistant:", "sure": i / 4} for i in range(8)]
    rows[3]["sure"] = None
    rows[5]["rejected"] = None
    assert all(row.margins is None for row in build(2, rows).train)
    built = build(2, rows, margin_column="sure")
    assert not built.report.from_cache
    found = {row.row_id: None if row.margins is None else row.margins.tolist() for row in built.train}
    assert found == {i: None if i == 3 else [i / 4] for i in range(8) if i != 5}
    for phase in (1, 3):  # which it does not concern
        build(phase, rows)
        assert build(phase, rows, margin_column="sure").report.from_cache


def test_references_of_any_json_value(own, tiny_tokenizer):
    for reference in ("18", {"answers": [1, 2]}, 0):
        data = own(
            get_reference=lambda self, sample, value=reference: value,
            rows=[{**Own.rows[0], "k": str(reference)}] * 5,
        )
        assert build_phase(3, data, tiny_tokenizer, 1).train[0].reference == reference


def test_sentences_that_deepspeed_chat_asks_for_are_enough(own, tiny_tokenizer):
    """A subclass may know sentences only; where one does not begin with the prompt, get_chosen is asked."""
    data = own(
        get_chosen=lambda self, sample: None,
        get_prompt_and_chosen=lambda self, sample: sample["p"] + " whole",
        data_split="1,0,0",
    )
    row = build_phase(1, data, tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids[row.loss_mask][:-1]) == " whole"
    data = own(get_prompt_and_chosen=lambda self, sample: "another prompt" + sample["c"], data_split="1,0,0")
    row = build_phase(1, with_flags(data, rebuild_cache=True), tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids) == "Human: a Assistant: b<|endoftext|>"


TALK = "Human: Hi Assistant: Yes? Human: Two and two? Assistant:"
ONLY_SENTENCES = {
    "get_prompt": lambda self, sample: None,
    "get_chosen": lambda self, sample: None,
    "get_rejected": lambda self, sample: None,
    "get_prompt_and_chosen": lambda self, sample: f"{TALK} four",
    "get_prompt_and_rejected": lambda self, sample: f"{TALK} five",
}


def margin(value):
    return {"get_margin": lambda self, sample: value}


FROM_0 = "get_margin: expected a number of 0 or more"


@pytest.mark.parametrize(
    ("members", "phase", "fragment"),
    [
        ({"get_prompt": lambda self, s: 5}, 1, "dataset 'own', row .*: Own.get_prompt: expected text or None, got int"),
        ({"get_prompt_and_chosen": lambda self, s: ["a"]}, 1, "prompt_and_chosen: expected text or None, got list"),
        ({"get_responses": lambda self, s: [" a"]}, 2, r"expected 2 or more strings, or None, got 1 responses \(str\)"),
        ({"get_responses": lambda self, s: [" a", None]}, 2, r"got 2 responses \(str, NoneType\)"),
        (
            margin("0.5"),
            2,
            FROM_0 + r" for each pair of adjacent responses in the ranking \(1 in all\), or None, got '0.5'",
        ),
        (margin(-1.0), 2, FROM_0 + ".*, got -1.0"),
        (margin(float("nan")), 2, FROM_0 + ".*, got nan"),
        (margin(float("inf")), 2, FROM_0 + ".*, got inf"),
        (margin(True), 2, FROM_0 + ".*, got True"),
        (margin([1, 2]), 2, FROM_0 + r".*\(1 in all\), or None, got \[1, 2\]"),
        (
            {"get_chosen": lambda self, s: s["chosn"]},
            1,
            r"^dataset 'own', row \d+: .*<lambda> raised KeyError: 'chosn' \(test_samples.py, line \d+\); threestep ",
        ),
        ({"get_messages": lambda self, s: s["chat"]}, 1, r"^dataset 'own', row \d+: .* raised KeyError: 'chat' \("),
        ({"get_reference": lambda self, s: s["ref"]}, 3, r"^dataset 'own', row \d+: .* raised KeyError: 'ref' \("),
        ({"get_reference": lambda self, s: {1, 2}}, 3, "get_reference: expected a value that JSON can represent"),
        ({"rows": []}, 1, "dataset 'own' is empty: it has no training rows"),
        (
            {"get_rejected": lambda self, s: None},
            2,
            r"step 2 .* has no training rows: all 7 rows of 'own' were dropped",
        ),
        ({"data_split": "1,0,1"}, 2, "data_split 1,0,1 gives it no rows from 'own'"),
        ({**ONLY_SENTENCES, "data_split": "0,0,1"}, 3, "dropped .*no_prompt"),
        ({**ONLY_SENTENCES, "get_prompt_and_rejected": lambda self, s: None}, 2, "dropped .*no_rejected"),
    ],
)
def test_mistakes_of_a_class_are_named(own, tiny_tokenizer, members, phase, fragment):
    with pytest.raises(ThreestepError, match=fragment):
        build_phase(phase, own(**members), tiny_tokenizer, 1)


@pytest.mark.parametrize(
    ("sentences", "prompt"),
    [
        ([f"{TALK} four"], TALK),
        ([f"{TALK} four", f"{TALK} five"], TALK),
        # They part before the last turn: what both have said until then is the prompt.
        ([f"{TALK} four", "Human: Hi Assistant: Oh. Human: Two and two? Assistant: four"], "Human: Hi Assistant:"),
        (["2 + 2 = 4"], ""),
        (["2 + 2 = 4", "2 + 2 = 5"], "2 + 2 ="),
        (["word", "wood"], ""),
    ],
)
def test_the_prompt_of_sentences(sentences, prompt):
    assert prompt_of_sentences(sentences) == prompt


def test_a_class_that_knows_sentences_alone_serves_steps_1_and_2(own, tiny_tokenizer):
    """All that DeepSpeed-Chat's steps 1 and 2 call; step 3 needs prompts."""
    row = build_phase(1, own(**ONLY_SENTENCES, data_split="1,0,0"), tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids[row.loss_mask]) == " four<|endoftext|>"
    assert tiny_tokenizer.decode(row.input_ids[~row.loss_mask]) == TALK
    row = build_phase(2, own(**ONLY_SENTENCES, data_split="0,1,0"), tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.prompt_ids) == TALK
    assert [tiny_tokenizer.decode(ids[:-1]) for ids in row.response_ids] == [" four", " five"]


def test_sentences_that_contradict_the_parts_are_counted_and_said(own, tiny_tokenizer):
    rows = [{"p": f"Human: {i}? Assistant:", "c": f" {i}", "r": " no"} for i in range(20)]
    said: list[str] = []
    data = own(
        rows=rows,
        get_prompt_and_chosen=lambda self, sample: (" " if sample["c"] == " 3" else "") + sample["p"] + sample["c"],
        data_split="1,0,0",
        eval_fraction=0.0,
    )
    built = build_phase(1, data, tiny_tokenizer, 1, log=said.append)
    assert built.report.train.noted == {
        "built from prompt and response, because the sentence does not begin with the prompt": 1
    }
    assert (
        "1 built from prompt and response, because the sentence does not begin with the prompt, none dropped"
        in said[-1]
    )
    assert build_phase(3, own(rows=rows, data_split="0,0,1"), tiny_tokenizer, 1).report.train.noted == {}


def test_each_phase_has_a_kind():
    assert [kind_of(phase).name for phase in PHASES] == ["sentences", "ranked", "prompts"]
    assert [kind_of(phase).phase for phase in PHASES] == list(PHASES)
    assert kind_of("ranked") is kind_of(2) and len({kind.key for kind in KINDS.values()}) == len(KINDS)


def test_marked_responses(build, tiny_tokenizer):
    rows = [{"prompt": f"Say {i}.", "completion": f" {i}", "label": i % 2 == 0} for i in range(12)]
    built = build("marked", rows)
    texts = {tiny_tokenizer.decode(row.response_ids[0][:-1]) for row in built.train}
    assert texts == {f" {i}" for i in range(12)} and "phase2_marked" in built.train.path
    for row in built.train:
        number = int(tiny_tokenizer.decode(row.response_ids[0][:-1]))
        assert row.is_good is (number % 2 == 0) and row.margins is None and row.batched == ("is_good",)
    assert list(built.train.values("is_good")) == [row.is_good for row in built.train]
    assert build("marked", rows).report.from_cache
    said = r"all 3 rows of .* were dropped \(3 unmarked\); each response needs its own label"
    with pytest.raises(ThreestepError, match=said):
        build("marked", [{"prompt": "a", "completion": "b"}] * 3)
    with pytest.raises(ThreestepError, match="write a pair as two rows"):
        build("marked")


def test_marked_conversations(build):
    """Marks of chats, under a chat template; a bad answer is read as a good one is."""
    asked, said = [user("Say 1.")], [assistant("1")]
    rows = [{"prompt": asked, "completion": said, "label": i % 3 == 0} for i in range(9)]
    built = build("marked", rows, chat_tokenizer(chat_template("chatml")), prompt_style="chat_template")
    assert sorted(row.is_good for row in built.train) == [False] * 6 + [True] * 3
    assert all(len(row.response_ids) == 1 for row in built.train)
