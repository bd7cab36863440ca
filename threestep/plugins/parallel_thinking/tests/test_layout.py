"""Parallel paths as segments: the rule token by token, malformed texts, and what plain models give of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.parallel_thinking.layout import (
    Block,
    MalformedBlocks,
    drawn_blocks,
    drawn_document,
    find_blocks,
    parallel_document,
    shared_prompt_in_parallel,
)
from threestep.plugins.parallel_thinking.tests.parallel_texts import TAGS, Path, Text, some_ids, texts
from threestep.plugins.sft_losses.neftune import embedding_noise
from threestep.plugins.sft_losses.tests.test_sft_losses import document
from training.utils.contracts.documents import Document, TokenSequence, join, plain, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import SequenceLayout, documents_of, rank_share
from training.utils.models.token_model import PolicyModel, ScalarModel

P, Q, A, B, C, D = 10, 11, 12, 13, 14, 15
OPEN, PATH, END_PATH, CLOSE = 3, 4, 5, 6


def mask_of(rows: TokenRows) -> torch.Tensor:
    """bool [T, T] of the first row."""
    mask, width = rows.dense_mask(), rows.input_ids_NT.shape[1]
    return torch.ones(width, width, dtype=torch.bool).tril() if mask is None else mask[0, 0]


def assert_laid_out(document: Document, ids: list[int], positions: list[int], mask: torch.Tensor) -> TokenRows:
    rows = packed_rows([[document]], 0)
    assert rows.input_ids_NT[0].tolist() == ids  # every token once, where it stands in the text
    assert rows.position_ids_NT[0].tolist() == positions
    assert torch.equal(mask_of(rows), mask)
    return rows


def test_the_worked_example():
    """The one of the module's docstring: p q ( < a b > < c > ) d."""
    sequence = Text().trunk(P, Q).block(Path([A, B]), Path([C])).trunk(D).sequence()
    document = parallel_document(sequence, TAGS)
    assert [part.tokens.input_ids.tolist() for part in document.segments] == [
        [P, Q, OPEN],
        [PATH, A, B, END_PATH],
        [PATH, C, END_PATH],
        [CLOSE, D],
    ]
    assert [part.sees for part in document.segments] == [(), (0,), (0,), (0, 1, 2)]
    assert [part.first_position for part in document.segments] == [0, 3, 3, 7]
    assert [part.predecessor for part in document.segments] == [None, 0, 0, 2]
    assert (document.ends, document.owners) == ((3,), ((0,),) * 4)
    rows = packed_rows([[document]], 0)
    assert rows.position_ids_NT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 7, 8]]
    assert rows.target_ids_M.tolist() == [Q, OPEN, PATH, A, B, END_PATH, PATH, C, END_PATH, CLOSE, D]
    assert rows.predictor_M.tolist() == [0, 1, 2, 3, 4, 5, 2, 7, 8, 9, 10]
    assert rows.end_B.tolist() == [11]


@settings(max_examples=80, deadline=None)
@given(texts(), st.data())
def test_the_layout_is_the_rule(text, data):
    """Token by token: order, positions, who sees whom, what each target is predicted from."""
    targets = [data.draw(st.booleans()) for _ in text.ids[1:]]
    sequence = TokenSequence(torch.tensor(text.ids), torch.tensor([False, *targets]))
    rows = assert_laid_out(parallel_document(sequence, TAGS), text.ids, text.positions, text.mask())
    wanted = [column for column, is_target in enumerate([False, *targets]) if is_target]
    assert rows.target_ids_M.tolist() == [text.ids[column] for column in wanted]
    assert rows.predictor_M.tolist() == [text.predecessors[column] for column in wanted]
    assert rows.sequence_M.tolist() == [0] * len(wanted) and rows.end_B.tolist() == [len(text.ids) - 1]


@settings(max_examples=60, deadline=None)
@given(texts(), st.data())
def test_a_cut_text_is_the_beginning_of_the_whole_one(text, data):
    """Truncation changes nothing of what it leaves."""
    kept = data.draw(st.integers(1, len(text.ids)))
    whole = text.sequence()
    cut = TokenSequence(whole.input_ids[:kept], whole.is_target[:kept])
    rows = assert_laid_out(
        parallel_document(cut, TAGS), text.ids[:kept], text.positions[:kept], text.mask()[:kept, :kept]
    )
    assert rows.predictor_M.tolist() == text.predecessors[1:kept]
    assert rows.end_B.tolist() == [kept - 1]


def test_tags_that_a_prompt_quotes_are_text():
    """Malformed as they stand: only what the model writes is parsed. What shares no prompt was not drawn: unsupervised
    texts."""
    quoted = [P, OPEN, PATH, OPEN, Q]
    text = Text().trunk(*quoted).block(Path([A]), Path([B])).trunk(D)
    sequence = text.sequence(first_target=len(quoted))
    assert_laid_out(parallel_document(sequence, TAGS, sequence.is_target), text.ids, text.positions, text.mask())
    with pytest.raises(MalformedBlocks, match="token 3: a block opens inside a block"):
        parallel_document(sequence, TAGS)
    plan = PlanSettings(1, 400, 8, True, 400, form=TAGS)
    ((_, rows),) = rank_share(in_parallel()[:1], SequenceLayout(plan, PAD, 0), CPU, sharing=False)
    assert rows.segments is None
    ((_, rows),) = rank_share(in_parallel()[:1], SequenceLayout(plan, PAD, 0), CPU)
    assert rows.segments is not None and documents_of(in_parallel()[:1], plan)[0].tokens == rows.input_ids_NT.shape[1]


def test_a_block_does_not_go_on_through_what_another_wrote():
    """Two turns of a conversation: each path is closed, the block goes on behind what the user said."""
    ids = torch.tensor([P, OPEN, PATH, A, END_PATH, Q, Q, PATH, B, END_PATH, CLOSE])
    is_written = torch.ones(len(ids), dtype=torch.bool)
    assert len(find_blocks(ids, TAGS, is_written)) == 1
    is_written[5:7] = False
    for given_ids, mask in ((ids, is_written), (ids[:8], is_written[:8])):
        with pytest.raises(MalformedBlocks, match="token 5: a block contains text that the model does not write"):
            find_blocks(given_ids, TAGS, mask, cut=True)


@settings(max_examples=60, deadline=None)
@given(some_ids(1), st.lists(texts(most_blocks=2), min_size=1, max_size=3))
def test_responses_with_blocks_share_their_prompt(prompt_ids, responses):
    """Each response is laid out as behind its own copy of the prompt, and by itself again in `unshared`."""
    prompt = TokenSequence(torch.tensor(prompt_ids), torch.zeros(len(prompt_ids), dtype=torch.bool))
    document = shared_prompt_in_parallel(prompt, [text.sequence(first_target=0) for text in responses], TAGS)
    assert document.tokens == len(prompt_ids) + sum(len(text.ids) for text in responses)
    rows = packed_rows([[document]], 0)
    mask, length = mask_of(rows), len(prompt_ids)
    start = length
    for number, (text, alone) in enumerate(zip(responses, unshared(document), strict=True)):
        whole = Text().trunk(*prompt_ids)
        own = slice(start, start + len(text.ids))
        columns = [*range(length), *range(own.start, own.stop)]
        expected = torch.ones(length + len(text.ids), length + len(text.ids), dtype=torch.bool).tril()
        expected[length:, length:] = text.mask()
        assert torch.equal(mask[columns][:, columns], expected)
        assert not mask[own, length:start].any() and not mask[own, own.stop :].any()
        positions = [*range(length), *(length + position for position in text.positions)]
        assert rows.position_ids_NT[0, columns].tolist() == positions
        by_itself = assert_laid_out(alone, [*whole.ids, *text.ids], positions, expected)
        before = [length - 1, *(length + column for column in text.predecessors[1:])]
        assert by_itself.predictor_M.tolist() == before
        mine = rows.sequence_M == number
        assert rows.target_ids_M[mine].tolist() == text.ids
        assert rows.predictor_M[mine].tolist() == [columns[column] for column in before]
        assert int(rows.end_B[number]) == own.stop - 1
        start = own.stop


# By reason: tokens, and the one that is named.
MALFORMED = {
    "a block opens inside a block": ([P, OPEN, PATH, A, OPEN], 4),
    "a path opens outside of a block": ([P, PATH], 1),
    "a path opens inside a path": ([OPEN, PATH, A, PATH], 3),
    "a path closes without having been opened": ([OPEN, PATH, A, END_PATH, END_PATH], 4),
    "a path is empty": ([OPEN, PATH, END_PATH], 2),
    "a block closes without having been opened": ([P, CLOSE], 1),
    "a block closes before its last path does": ([OPEN, PATH, A, CLOSE], 3),
    "a block has no paths": ([P, OPEN, Q, CLOSE], 3),
}


@pytest.mark.parametrize(("reason", "given_ids"), MALFORMED.items(), ids=[name.replace(" ", "_") for name in MALFORMED])
def test_malformed_blocks(reason, given_ids):
    ids, column = given_ids
    for cut in (False, True):
        with pytest.raises(MalformedBlocks, match=f"^token {column}: {reason}$"):
            find_blocks(torch.tensor(ids), TAGS, cut=cut)
    with pytest.raises(MalformedBlocks, match=reason):
        parallel_document(TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool)), TAGS)


@pytest.mark.parametrize(
    ("ids", "inside"), [([OPEN], "block"), ([OPEN, PATH, A], "path"), ([OPEN, PATH, A, END_PATH, B], "block")]
)
def test_a_block_that_is_never_closed(ids, inside):
    with pytest.raises(MalformedBlocks, match=f"token {len(ids)}: the text ends in an open {inside}"):
        find_blocks(torch.tensor(ids), TAGS)
    assert find_blocks(torch.tensor(ids), TAGS, cut=True)[0].end is None


@settings(max_examples=60, deadline=None)
@given(texts(text_behind=False), st.data())
def test_blocks_of_a_drawn_text_are_those_of_a_written_one(text, data):
    """Of a well-formed text whose paths end with their tag, whole or cut anywhere."""
    ids = torch.tensor(text.ids)
    assert drawn_blocks(ids, TAGS) == find_blocks(ids, TAGS)
    cut = ids[: data.draw(st.integers(1, len(ids)))]
    written = [block for block in find_blocks(cut, TAGS, cut=True) if block.paths]
    assert list(drawn_blocks(cut, TAGS)) == written


@pytest.mark.parametrize(
    ("ids", "blocks"),
    [
        ([PATH, A, END_PATH, CLOSE, A], ()),  # tags in the trunk
        ([OPEN, END_PATH, OPEN, CLOSE, PATH, A, END_PATH, CLOSE], (Block((4,), 7),)),  # in an opening
        ([OPEN, PATH, PATH, OPEN, CLOSE, END_PATH, PATH, END_PATH, CLOSE], (Block((1, 6), 8),)),  # in a path
        ([OPEN, PATH, A, END_PATH, B, PATH, A, END_PATH], (Block((1,), 4),)),  # text behind a path ends the block
        ([OPEN, PATH, A, END_PATH], (Block((1,), None),)),  # cut behind a path
        ([OPEN, PATH, A, END_PATH, PATH], (Block((1, 4), None),)),
        ([OPEN, PATH], (Block((1,), None),)),
        ([OPEN, A, A], ()),
        (
            [OPEN, PATH, END_PATH, CLOSE, OPEN, PATH, END_PATH, OPEN, PATH, A],
            (Block((1,), 3), Block((5,), 7), Block((8,), None)),
        ),
    ],
)
def test_a_tag_out_of_place_is_text_in_a_drawn_text(ids, blocks):
    assert drawn_blocks(torch.tensor(ids), TAGS) == blocks


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([OPEN, PATH, END_PATH, CLOSE, A, B]), min_size=1, max_size=14), some_ids(1))
def test_a_drawn_response_lies_behind_its_prompt(ids, prompt_ids):
    """Whatever it is: its tokens as they stand, alone and beside another response, which changes nothing."""
    prompt, response = Text().trunk(*prompt_ids).sequence(99), Text().trunk(*ids).sequence(0)
    rows = packed_rows([[drawn_document(prompt, [response], TAGS)]], 0)
    assert rows.input_ids_NT[0].tolist() == [*prompt_ids, *ids] and rows.target_ids_M.tolist() == ids
    first, *others = unshared(drawn_document(prompt, [response, response], TAGS))
    assert len(others) == 1
    for alone in (first, *others):
        shared = packed_rows([[alone]], 0)
        assert shared.input_ids_NT.tolist() == rows.input_ids_NT.tolist()
        assert shared.position_ids_NT.tolist() == rows.position_ids_NT.tolist()
        assert torch.equal(mask_of(shared), mask_of(rows)) and torch.equal(shared.predictor_M, rows.predictor_M)


FAMILIES = ["llama", "gpt2", "opt", "qwen3"]
CPU, PAD = torch.device("cpu"), 0
READ = {torch.float64: {"rtol": 3e-7, "atol": 1e-7}, torch.float32: {"rtol": 2e-5, "atol": 2e-5}}
TYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def two_blocks(second_path: int = 30) -> Text:
    """Two blocks with text around them, paths of several lengths, text between paths."""
    text = Text().trunk(10, 11, 12)
    text.block(Path([20, 21, 22], [23]), Path([second_path, 31]), Path([40, 41, 42, 43, 44]), opening=[13])
    return text.trunk(50, 51).block(Path([24]), Path([32, 33, 34], [35, 36])).trunk(52, 53, 54)


def by_hand(model: torch.nn.Module, text: Text) -> torch.Tensor:
    """Log-probabilities of every token but the first: the plain model under the dense mask of the rule."""
    logits_TV = model(
        input_ids=torch.tensor([text.ids]),
        position_ids=torch.tensor([text.positions]),
        attention_mask=text.mask()[None, None],
        use_cache=False,
    ).logits[0]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    return logprobs_TV[text.predecessors[1:], text.ids[1:]]


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([part.grad.double().flatten() for part in model.parameters() if part.grad is not None])


def assert_same_gradient(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert float(want.norm()) > 1e-3
    assert float((got - want).norm() / want.norm()) < (2e-7 if dtype == torch.float64 else 5e-6)


@TYPES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "packed"])
def test_the_layout_is_the_dense_mask_of_the_rule(family, dtype, beside):
    model, text = tiny_causal_lm(family, dtype), two_blocks()
    policy, document = PolicyModel(model), parallel_document(text.sequence(), TAGS)
    neighbour = plain(TokenSequence(torch.arange(10, 19), torch.zeros(9, dtype=torch.bool)))
    rows = packed_rows([[neighbour, document]] if beside else [[document]], PAD)
    weights_M = torch.randn(len(text.ids) - 1, generator=torch.Generator().manual_seed(0))
    got, want = policy(rows).logprobs_M, by_hand(model, text)
    torch.testing.assert_close(got, want, **READ[dtype])
    assert_same_gradient(gradient(model, (got * weights_M).sum()), gradient(model, (want * weights_M).sum()), dtype)


@TYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_path_is_what_it_is_alone(family, dtype):
    """The trunk with one path behind it is a plain sequence, positions 0, 1, 2, ...: no mask, no other path."""
    policy = PolicyModel(tiny_causal_lm(family, dtype))
    text = Text().trunk(10, 11, 12).block(Path([20, 21, 22]), Path([30, 31], [37]), Path([40]), opening=[13])
    ids = torch.tensor(text.ids)
    trunk = [column for column, place in enumerate(text.places) if place is None][:-1]  # without </Parallel>
    losses = {"parallel": torch.zeros(()), "alone": torch.zeros(())}
    for path in range(3):
        own = [column for column, place in enumerate(text.places) if place == (0, path)]
        alone = TokenSequence(ids[trunk + own], torch.arange(len(trunk) + len(own)) >= len(trunk))
        are_targets = torch.zeros(len(ids), dtype=torch.bool)
        are_targets[own] = True
        document = parallel_document(TokenSequence(ids, are_targets), TAGS)
        got = policy(packed_rows([[document]], PAD)).logprobs_M
        want = policy(packed_rows([[plain(alone)]], PAD)).logprobs_M
        torch.testing.assert_close(got, want, **READ[dtype])
        losses["parallel"] = losses["parallel"] + got.sum() * (path + 1)
        losses["alone"] = losses["alone"] + want.sum() * (path + 1)
    gradients = {name: gradient(policy, loss) for name, loss in losses.items()}
    assert_same_gradient(gradients["parallel"], gradients["alone"], dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_with_blocks_score_as_behind_their_own_prompt(family):
    """Reward models: the prompt once for all responses, or a row a response."""
    scorer = ScalarModel(tiny_scalar_model(family, torch.float64))
    prompt = TokenSequence(torch.tensor([7, 8, 9]), torch.zeros(3, dtype=torch.bool))
    texts_ = [two_blocks(), Text().trunk(10).block(Path([11]), Path([12, 13])).trunk(14), Text().trunk(15, 16)]
    responses = [TokenSequence(torch.tensor(text.ids), torch.zeros(len(text.ids), dtype=torch.bool)) for text in texts_]
    document: Document = shared_prompt_in_parallel(prompt, responses, TAGS)
    with torch.no_grad():
        shared_B = scorer(packed_rows([[document]], PAD))
        rows_B = scorer(packed_rows([[alone] for alone in unshared(document)], PAD))
        by_hand_B = []
        for text in texts_:
            width = 3 + len(text.ids)
            mask = torch.ones(width, width, dtype=torch.bool).tril()
            mask[3:, 3:] = text.mask()
            hidden = scorer.model.base_model(
                input_ids=torch.tensor([[7, 8, 9, *text.ids]]),
                position_ids=torch.tensor([[0, 1, 2, *(3 + position for position in text.positions)]]),
                attention_mask=mask[None, None],
                use_cache=False,
            )[0]
            by_hand_B.append(scorer.model.score(hidden[0, -1]).squeeze(-1).to(shared_B.dtype))
    torch.testing.assert_close(shared_B, rows_B, **READ[torch.float64])
    torch.testing.assert_close(shared_B, torch.stack(by_hand_B), **READ[torch.float64])
    assert VOCABULARY > max(max(text.ids) for text in texts_)


def in_parallel() -> list[TokenSequence]:
    """Samples of two prompts, with blocks of two paths, cut ones, and tags out of place; some tags are no target."""
    block, cut, stray = [3, 4, 20, 21, 5, 4, 22, 5, 6], [3, 30, 4, 20, 5, 4, 22], [5, 20, 6, 3, 21]
    responses = [
        [11, *block, 12],
        [*block, 3, 4, 9, 5, 4, 8, 7, 5, 6, 13],
        cut,
        stray,
        [*block[:4], 5, *block[5:]],
        [17, *cut],
    ]
    samples = [join(torch.arange(4 + index % 2) + 40, torch.tensor(ids)) for index, ids in enumerate(responses)]
    for sample in samples:
        sample.is_target[(sample.input_ids == 6) & (torch.arange(len(sample)) > 8)] = False
    return samples


def test_packed_shared_and_padded_drawn_responses_are_one_gradient():
    """Blocks in parallel in each form; a form without the tags computes something else."""
    model = tiny_causal_lm("llama", torch.float64)
    samples = in_parallel()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(int(sample.is_target.sum()), generator=generator, dtype=torch.float64) for sample in samples]
    plans = {
        "packed": PlanSettings(1, 400, 8, True, 400, form=TAGS),
        "in_micro_batches": PlanSettings(2, 40, 8, True, 40, form=TAGS),
        "padded": PlanSettings(2, max_rows_per_micro_batch=2, form=TAGS),
        "in_one_piece": PlanSettings(1, max_rows_per_micro_batch=6),
    }
    found = {}
    for name, plan in plans.items():
        model.zero_grad()
        logprobs: dict[int, torch.Tensor] = {}
        for indices, rows in (
            part for rank in range(plan.ranks) for part in rank_share(samples, SequenceLayout(plan, PAD, rank), CPU)
        ):
            read_M = PolicyModel(model)(rows).logprobs_M
            split = read_M.split([len(weights[index]) for index in indices]) if indices else ()
            logprobs |= {index: part.detach() for index, part in zip(indices, split, strict=True)}
            if indices:
                sum((part * weights[index]).sum() for index, part in zip(indices, split, strict=True)).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        found[name] = torch.cat([logprobs[index] for index in range(len(samples))]), gradient
    for name in ("in_micro_batches", "padded"):
        for one, other in zip(found["packed"], found[name], strict=True):
            # Norms compute in float32: the gradient of a prompt is rounded in each of its copies.
            assert float((one - other).abs().max()) < 1e-6 * float(one.abs().max()), name
    assert not torch.allclose(found["packed"][0], found["in_one_piece"][0], atol=1e-3)


def test_parallel_paths_are_one_sequence():
    """Whose last position is not its length - 1: all its tokens have noise, by their number."""
    text = Text().trunk(10, 11).block(Path([12, 13]), Path([14])).trunk(15)
    paths = parallel_document(text.sequence(), TAGS)
    noise_NTE = embedding_noise(packed_rows([[document(3), paths], [document(5)]], PAD), [1, 2, 3], 5.0, 6)
    of_the_same_length = embedding_noise(packed_rows([[document(12)]], PAD), [2], 5.0, 6)[0]
    assert torch.equal(noise_NTE[0, 3:], of_the_same_length)
    assert noise_NTE[1, :5].all() and not noise_NTE[1, 5:].any()
