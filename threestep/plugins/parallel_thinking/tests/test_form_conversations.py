"""Blocks in the rows of each phase under a chat template."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import chat_tokenizer
from tests.support.data_flags import data_flags
from tests.unit.utils.data.kinds.test_kind_chat import TALK, talks  # noqa: F401
from training.utils.base.errors import ThreestepError
from training.utils.data.rows.documents import responses_document, sentence_document
from training.utils.loading.tokenizers import add_tokens

pytestmark = pytest.mark.unit

BLOCK = "<Parallel><Path>a</Path><Path>b</Path></Parallel>"
TWO_TURNS = [
    {"role": "user", "content": f"one, as in {BLOCK}<Path>"},
    {"role": "assistant", "content": f"1 {BLOCK}"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": f"2 {BLOCK} end"},
]


def segments(tokenizer, document):
    return [tokenizer.decode(part.tokens.input_ids) for part in document.segments]


@pytest.fixture
def thinks(talks, monkeypatch):  # noqa: F811
    """Build with the tags in the tokenizer."""
    make = chat_tokenizer

    def with_tags(template):
        tokenizer = make(template)
        add_tokens(tokenizer, data_flags(parallel_thinking=True).tokens_in_need)
        return tokenizer

    monkeypatch.setitem(talks.__globals__, "chat_tokenizer", with_tags)
    return lambda phase, rows, **given: talks(phase, rows, parallel_thinking=True, **given)


def test_blocks_of_every_turn_that_carries_loss_and_of_no_other(thinks):
    """A user's tags are text; so is the history with --train_turns last, as when it is read before a rollout."""
    row = [{"messages": TWO_TURNS}]
    phase, tokenizer = thinks(1, row)
    found = segments(tokenizer, sentence_document(phase.train[0]))
    assert len(found) == 7 and found[0].endswith("1 <Parallel>") and found[1:3] == ["<Path>a</Path>", "<Path>b</Path>"]
    assert found[3].startswith("</Parallel><|im_end|>") and found[3].endswith("2 <Parallel>")
    assert found[6] == "</Parallel> end<|im_end|>" + "\n" * found[6].endswith("\n")
    last, _ = thinks(1, row, train_turns="last")
    assert len(segments(tokenizer, sentence_document(last.train[0]))) == 4
    assert phase.report.train.parallel == last.report.train.parallel == {"with blocks": 1}


@pytest.mark.parametrize("policy", ["drop", "causal", "error"])
def test_a_block_that_goes_on_in_the_next_turn_is_malformed(thinks, policy):
    first, second = "1 <Parallel><Path>a</Path>", "<Path>b</Path></Parallel>"
    torn = [dict(message) for message in TWO_TURNS]
    torn[1]["content"], torn[3]["content"] = first, second
    rows = [{"messages": torn}, {"messages": TWO_TURNS}]
    if policy == "error":
        with pytest.raises(ThreestepError, match="row 0: the tags .* a block holds text that the model does not write"):
            thinks(1, rows)
        return
    phase, tokenizer = thinks(1, rows, malformed_parallel=policy)
    assert len(phase.train) == (1 if policy == "drop" else 2)
    assert sorted(len(sentence_document(row).segments) for row in phase.train) == ([7] if policy == "drop" else [1, 7])


def test_a_conversation_cut_inside_a_block(thinks):
    """At its end: the beginning of the layout. At its beginning or in its middle: dropped and counted."""
    whole, tokenizer = thinks(1, [{"messages": TWO_TURNS}])
    ids = whole.train[0].input_ids.tolist()
    path = tokenizer.convert_tokens_to_ids("<Path>")
    second_block = [place for place, token in enumerate(ids) if token == path][-2:]
    cut, _ = thinks(1, [{"messages": TWO_TURNS}], max_seq_len=second_block[1] + 2)
    document = sentence_document(cut.train[0])
    assert len(document.segments) == 6 and len(document.segments[-1].tokens) == 2
    first_block = [place for place, token in enumerate(ids) if token == path][-4:-2]
    rows = [{"messages": TWO_TURNS}, {"messages": TALK}]
    left, _ = thinks(1, rows, max_seq_len=len(ids) - first_block[0] - 1, truncation="left")
    assert left.report.train.dropped == {"cut_inside_a_block": 1} and len(left.train) == 1


def test_ranked_responses_with_blocks(thinks):
    prompt = [{"role": "user", "content": "one"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (f"1 {BLOCK}", "2"))
    phase, tokenizer = thinks(2, [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    found = segments(tokenizer, responses_document(phase.train[0], are_targets=False))
    assert found[1:4] == ["1 <Parallel>", "<Path>a</Path>", "<Path>b</Path>"] and len(found) == 6
    length = phase.train[0].length_tokens
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected}, {"prompt": prompt, "chosen": rejected,
            "rejected": [{"role": "assistant", "content": "3"}]}]  # fmt: skip
    cut, _ = thinks(2, rows, max_seq_len=length - 6)
    assert cut.report.train.dropped == {"cut_inside_a_block": 1} and len(cut.train) == 1
