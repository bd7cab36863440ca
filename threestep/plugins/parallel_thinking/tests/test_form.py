"""From texts with tags to rows that are laid out in parallel, malformed ones, and every mistake's sentence."""

from __future__ import annotations

import copy

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import data_flags, with_flags
from tests.support.data_forms import write_jsonl
from tests.support.pair_rows import all_rows
from tests.unit.utils.data.test_fingerprint_row_versions import PLAIN as PLAIN_FLAGS
from tests.unit.utils.data.test_fingerprint_row_versions import byte_tokenizer, content, digest
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.rows.documents import responses_document, sentence_document
from training.utils.flags.flags import note_mistakes
from training.utils.loading.tokenizers import add_tokens

TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]
PROMPT = "Human: What is 2 + 3? Assistant:"
BLOCK = "<Parallel><Path> two and three</Path><Path> one more than 4</Path></Parallel>"
GOOD = {"prompt": PROMPT, "chosen": f" Let me see. {BLOCK} 5.", "rejected": " It is 4."}
PLAIN = {"prompt": PROMPT, "chosen": " 2 + 3 is 5.", "rejected": " It is 4."}
STRAY = {"prompt": PROMPT, "chosen": f" Let me see. {BLOCK}</Path> 5.", "rejected": " It is 4."}
UNCLOSED = {"prompt": PROMPT, "chosen": " <Parallel><Path> two", "rejected": " It is 4."}


@pytest.fixture
def tagged(tiny_tokenizer):
    """The tiny tokenizer with Parallel-R1's tags."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    assert add_tokens(tokenizer, TAGS) == 4
    return tokenizer


def built(phase, data, tokenizer):
    data = with_flags(data, parallel_thinking=True)
    data.split.data_split = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}[phase]
    return build_phase(phase, data, tokenizer, seed=1)


def texts(document, tokenizer):
    return [tokenizer.decode(part.tokens.input_ids) for part in document.segments]


def test_a_sentence_keeps_flat_ids_and_is_laid_out_in_segments(flags, tagged):
    phase = built(1, flags([GOOD] * 9), tagged)
    row = phase.train[0]
    assert row.form.numbers == tuple(tagged.convert_tokens_to_ids(TAGS))
    assert tagged.decode(row.input_ids) == PROMPT + GOOD["chosen"] + "<|endoftext|>"
    document = sentence_document(row)
    assert texts(document, tagged) == [
        PROMPT + " Let me see. <Parallel>",
        "<Path> two and three</Path>",
        "<Path> one more than 4</Path>",
        "</Parallel> 5.<|endoftext|>",
    ]
    assert sum(int(part.tokens.is_target.sum()) for part in document.segments) == int(row.loss_mask.sum())
    report = phase.report
    assert (
        report.train.parallel == {"with blocks": 8}
        and "parallel thinking: 8 with blocks, none dropped;" in report.sentence
    )


def test_rows_without_blocks_are_plain_and_off_the_tags_are_text(flags, tagged):
    plain = built(1, flags([PLAIN] * 9), tagged)
    assert plain.report.train.parallel == {"with blocks": 0}
    off = build_phase(1, flags([GOOD, STRAY] * 9, data_split="1,0,0"), tagged, seed=1)
    assert not any(row.form for row in off.train)
    assert off.report.train.parallel == {} and "parallel" not in off.report.sentence
    assert [len(sentence_document(phase.train[0]).segments) for phase in (plain, off)] == [1, 1]
    assert flags().form is None and flags().tokens_in_need == []
    assert flags(parallel_thinking=True).tokens_in_need == TAGS


def test_a_prompt_may_quote_the_tags_or_be_empty(flags, tagged):
    """As Parallel-R1's own prompt does; there they are parsed, and positions go wrong. Its first token is no target,
    for nothing predicts it; it is a tag all the same."""
    quoting = {**GOOD, "prompt": "Human: Think between <Parallel> and </Parallel>, <Path> by <Path>. Assistant:"}
    phase = built(1, flags([quoting] * 9), tagged)
    document = sentence_document(phase.train[0])
    assert texts(document, tagged)[0] == quoting["prompt"] + " Let me see. <Parallel>"
    assert len(document.segments) == 4
    phase = built(1, flags([{"prompt": "", "chosen": f"{BLOCK} 5.", "rejected": " It is 4."}] * 9), tagged)
    document = sentence_document(phase.train[0])
    assert len(document.segments) == 4 and texts(document, tagged)[0] == "<Parallel>"


@pytest.mark.parametrize("row", [STRAY, UNCLOSED], ids=["stray", "unclosed"])
def test_a_malformed_row_is_named(flags, tagged, row):
    reason = "a path closes without having been opened" if row is STRAY else "the text ends in an open path"
    sentence = (
        r"^dataset 'jsonl:.*rows.jsonl', row [37]: the parallel-thinking tags \(<Parallel> <Path> </Path> "
        rf"</Parallel>\) do not match in the response: token \d+: {reason}; correct the row, or set "
        r"--malformed_parallel to drop or causal; threestep inspect with the same data flags shows how the "
        r"rows are read$"
    )
    rows = [GOOD] * 10
    rows[3] = rows[7] = row
    with pytest.raises(ThreestepError, match=sentence):
        built(1, flags(rows, eval_fraction=0.0), tagged)


def test_malformed_rows_dropped_or_kept_causal(flags, tagged):
    """Also the one that is never closed, which a cut row resembles."""
    phase = built(1, flags([GOOD, STRAY, UNCLOSED] * 3, eval_fraction=0.0, malformed_parallel="drop"), tagged)
    assert len(phase.train) == 3 and all(row.form for row in phase.train)
    assert phase.report.train.dropped == {"malformed_parallel": 6}
    with pytest.raises(
        ThreestepError, match=r"all 4 rows .* dropped \(4 malformed_parallel\); the parallel-thinking tags"
    ):
        built(1, flags([STRAY] * 4, eval_fraction=0.0, malformed_parallel="drop"), tagged)
    phase = built(1, flags([GOOD, STRAY, UNCLOSED] * 3, eval_fraction=0.0, malformed_parallel="causal"), tagged)
    kinds = {True: 4, False: 1}
    for row in phase.train:
        assert len(sentence_document(row).segments) == kinds[row.form is not None]
    assert phase.report.train.parallel == {"with blocks": 3, "malformed and causal": 6}
    assert sum(row.form is not None for row in phase.train) == 3


def test_a_sentence_cut_inside_a_path_is_the_beginning_of_the_whole(flags, tagged):
    whole = built(1, flags([GOOD] * 9), tagged)
    document = sentence_document(whole.train[0])
    length = len(document.segments[0].tokens) + len(document.segments[1].tokens) + 3
    cut = built(1, flags([GOOD] * 9, max_seq_len=length), tagged)
    row = cut.train[0]
    assert row.form and cut.report.train.truncated == len(cut.train)
    parts = sentence_document(row).segments
    assert texts(document, tagged)[:2] == [tagged.decode(part.tokens.input_ids) for part in parts[:2]]
    assert [part.first_position for part in parts] == [part.first_position for part in document.segments[:3]]
    assert len(parts) == 3 and len(parts[2].tokens) == 3


def test_responses_share_their_prompt(flags, tagged):
    phase = built(2, flags([GOOD] * 9), tagged)
    row = phase.train[0]
    assert row.form
    for are_targets in (False, True):
        document = responses_document(row, are_targets)
        assert texts(document, tagged) == [
            PROMPT,
            " Let me see. <Parallel>",
            "<Path> two and three</Path>",
            "<Path> one more than 4</Path>",
            "</Parallel> 5.<|endoftext|>",
            " It is 4.<|endoftext|>",
        ]
        assert document.ends == (4, 5) and document.owners == (*((0,),) * 5, (1,))
        targets = sum(int(part.tokens.is_target.sum()) for part in document.segments)
        assert targets == (document.tokens - len(row.prompt_ids) if are_targets else 0)


def test_a_response_cut_inside_a_block_is_no_response(flags, tagged):
    """The score would be read in one path, which the others do not reach."""
    whole = built(2, flags([GOOD] * 9), tagged).train[0]
    rows = [GOOD, {**GOOD, "chosen": " 5."}] * 8
    data = flags(rows, max_seq_len=len(whole.prompt_ids) + len(whole.response_ids[0]) - 8, eval_fraction=0.0)
    phase = built(2, data, tagged)
    assert phase.report.train.dropped == {"cut_inside_a_block": 8} and len(phase.train) == 8
    assert not any(row.form for row in phase.train)


def test_phase_3_is_prompts_as_without_them(flags, tagged):
    on, off = (built(3, flags([GOOD] * 9, parallel_thinking=thinks), tagged) for thinks in (True, False))
    assert [row.prompt_text for row in on.train] == [row.prompt_text for row in off.train] and len(on.train)


def test_tags_of_other_names_and_a_tokenizer_without_the_tags(flags, tiny_tokenizer, tagged):
    sentence = "expects every tag to be a single token, but '<Parallel>' is not; add it to the tokenizer, as"
    with pytest.raises(ThreestepError, match=sentence):
        built(1, flags([GOOD] * 9), tiny_tokenizer)
    tags = ["<fork>", "<branch>", "</branch>", "</fork>"]
    assert add_tokens(tagged, tags) == 4
    named = GOOD["chosen"].replace("Parallel", "fork").replace("Path", "branch")
    phase = built(1, flags([{**GOOD, "chosen": named}] * 9, parallel_tags=tags), tagged)
    assert phase.train[0].form.numbers == tuple(tagged.convert_tokens_to_ids(tags))
    assert len(sentence_document(phase.train[0]).segments) == 4


def test_the_cache_follows_the_flags(flags, tagged):
    rows = [GOOD, STRAY] * 9
    first = built(1, flags(rows, malformed_parallel="drop"), tagged)
    again = built(1, flags(rows, malformed_parallel="drop"), tagged)
    other = built(1, flags(rows, malformed_parallel="causal"), tagged)
    off = build_phase(1, flags(rows, data_split="1,0,0"), tagged, seed=1)
    assert [phase.report.from_cache for phase in (first, again, other, off)] == [False, True, False, False]
    assert again.train[0].form and again.report.train == first.report.train
    assert len(other.train) == len(off.train) > len(first.train)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"parallel_tags": ["<a>", "<b>", "</b>"]}, "expects four different tags (to open a block, open a path, close "
         "a path and close a block), got 3: <a> <b> </b>"),
        ({"parallel_tags": ["<a>", "<b>", "<b>", "</a>"]}, "got 4: <a> <b> <b> </a>"),
        ({"parallel_tags": ["<a>", " ", "</b>", "</a>"]}, "expects four different tags"),
        ({"loss_on": "conversation"}, "tags count only where the loss falls, because a prompt may quote them"),
        ({"malformed_parallel": "casual"}, "expects one of error, drop, causal, got 'casual'; did you mean 'causal'"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be(flags, given, sentence):
    mistakes = Mistakes()
    note_mistakes(flags(parallel_thinking=True, **given), mistakes)
    assert len(mistakes.sentences) == 1 and sentence in mistakes.sentences[0]


SHORT_BLOCK = "<Parallel><Path>a</Path><Path>b</Path></Parallel>"
TWO_TURNS = [
    {"role": "user", "content": f"one, as in {SHORT_BLOCK}<Path>"},
    {"role": "assistant", "content": f"1 {SHORT_BLOCK}"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": f"2 {SHORT_BLOCK} end"},
]


def segments(tokenizer, document):
    return [tokenizer.decode(part.tokens.input_ids) for part in document.segments]


@pytest.fixture
def thinks(flags):
    """Build a phase from all of the rows, with the tags in a tokenizer of a chat template."""

    def make(phase, rows, **given):
        tokenizer = chat_tokenizer(chat_template("chatml"))
        add_tokens(tokenizer, TAGS)
        alone = {"data_split": {1: "1,0,0", 2: "0,1,0"}[phase], "eval_fraction": 0.0, "prompt_style": "chat_template"}
        data = flags(rows, parallel_thinking=True, **alone, **given)
        return build_phase(phase, data, tokenizer, seed=1), tokenizer

    return make


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
        with pytest.raises(
            ThreestepError,
            match="row 0: the parallel-thinking tags .* a block contains text that the model does not write",
        ):
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
    rows = [
        {"messages": TWO_TURNS},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    ]
    left, _ = thinks(1, rows, max_seq_len=len(ids) - first_block[0] - 1, truncation="left")
    assert left.report.train.dropped == {"cut_inside_a_block": 1} and len(left.train) == 1


def test_ranked_responses_with_blocks(thinks):
    prompt = [{"role": "user", "content": "one"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (f"1 {SHORT_BLOCK}", "2"))
    phase, tokenizer = thinks(2, [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    found = segments(tokenizer, responses_document(phase.train[0], are_targets=False))
    assert found[1:4] == ["1 <Parallel>", "<Path>a</Path>", "<Path>b</Path>"] and len(found) == 6
    length = phase.train[0].length_tokens
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected}, {"prompt": prompt, "chosen": rejected,
            "rejected": [{"role": "assistant", "content": "3"}]}]  # fmt: skip
    cut, _ = thinks(2, rows, max_seq_len=length - 6)
    assert cut.report.train.dropped == {"cut_inside_a_block": 1} and len(cut.train) == 1


PARALLEL = [
    {
        "prompt": f"Human: {i} + 3? Assistant:",
        "chosen": f" Well. <Parallel><Path> {i} and three</Path><Path> three and {i}</Path></Parallel> {i + 3}.",
        "rejected": " No.",
    }
    for i in range(24)
]
RECORDED = {1: "964ab3b2cfdec318", 2: "ed7f8313572f1574"}


@pytest.mark.parametrize("phase", RECORDED)
def test_rows_of_a_phase(phase, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "rows.jsonl", PARALLEL)
    monkeypatch.chdir(tmp_path)
    data = data_flags(
        data_path=["jsonl:rows.jsonl"],
        data_split={1: "1,0,0", 2: "0,1,0"}[phase],
        eval_fraction=0.0,
        parallel_thinking=True,
        data_output_path="cache",
        **PLAIN_FLAGS,
    )
    built = build_phase(phase, data, byte_tokenizer(), seed=1)
    assert digest(map(content, all_rows(built))) == RECORDED[phase], "rows changed: give ROWS another text"
