"""Paths that are drawn side by side: the training layout's log-probabilities, limits, seeds, and what is inserted."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PAD, prompts, responses, shapes_of_inputs
from threestep.plugins.parallel_thinking.arguments import ParallelRolloutArguments
from threestep.plugins.parallel_thinking.form import ParallelPaths, ParallelThinking
from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling, drawn_blocks, drawn_document
from threestep.plugins.ragged.ragged_rows import arranged
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import Document, TokenSequence
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Drawing, RolloutEngine, RolloutRequest, Sampling
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import packed_rows
from training.utils.models.own_forward import own_forward_of, read_own_forward
from training.utils.models.token_model import PolicyModel, Readout

TAGS = ParallelTags(open_block=3, open_path=4, close_path=5, close_block=6)
OPEN, PATH, END_PATH, CLOSE, END = 3, 4, 5, 6, 2
PATHS = Drawing(form=ParallelThinking(ParallelRolloutArguments(parallel_thinking=True)))
SAMPLING = Sampling(
    24, 1.0, top_k=0, top_p=1.0, end_token_id=END, pad_token_id=PAD, form=ParallelPaths(PathSampling(TAGS, 3))
)


def model_that_thinks(family: str = "llama", dtype: torch.dtype = torch.float32, **pulls: float):
    """A tiny model that likes tags; `pulls` are added to the logits of `_3`, `_4` and so on."""
    model = tiny_causal_lm(family, dtype)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.5 * head.weight.detach())  # rounding as of models, not of wide ones
    head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY, dtype=dtype))
    for token, pull in ({"_3": 3.5, "_4": 3.5, "_5": 3.5} | pulls).items():
        head.bias.data[int(token[1:])] = pull
    return model


def roll(model, sampling=SAMPLING, lengths=(3, 11, 1, 7), samples: int = 4, seeds=None) -> Rollout:
    ids_BP, mask_BP = prompts(lengths)
    seeds = list(range(len(ids_BP) * samples)) if seeds is None else seeds
    return TransformersRollout().roll_out(model, RolloutRequest(ids_BP, mask_BP, sampling, seeds, samples))


def split(sequence: TokenSequence) -> tuple[TokenSequence, TokenSequence]:
    """Prompt and response: the first token of a response is always drawn."""
    cut = int(sequence.is_target.long().argmax())
    parts = (slice(cut), slice(cut, None))
    prompt, response = (TokenSequence(sequence.input_ids[part], sequence.is_target[part]) for part in parts)
    return prompt, response


def document(sequence: TokenSequence) -> Document:
    prompt, response = split(sequence)
    return drawn_document(prompt, [response], TAGS)


def largest_difference(model, rollout: Rollout) -> float:
    """Between what was recorded and what the training forward computes of the drawn tokens."""
    rows = packed_rows([[document(sequence)] for sequence in rollout.sequences()], PAD)
    with torch.no_grad():
        trained_M = PolicyModel(model)(rows).logprobs_M
    return float((trained_M - rollout.drawn.logprobs_BR[rollout.drawn.mask_BR]).abs().max())


@pytest.fixture(scope="module")
def model():
    return model_that_thinks()


@pytest.fixture(scope="module")
def rollout(model):
    """500 responses."""
    return roll(model, lengths=(3, 11, 1, 7, 5) * 10, samples=10)


def test_log_probabilities_of_500_responses_are_the_training_layouts(model, rollout):
    assert len(rollout.ended_B) == 500 and rollout.inserted_BR.any(dim=1).sum() > 250
    assert largest_difference(model, rollout) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "opt"])
def test_in_float64_to_the_precision_of_the_record(family):
    """float32 of numbers up to 16: 1e-6."""
    model = model_that_thinks(family, torch.float64)
    drawn = roll(model)
    assert drawn.inserted_BR.any() and largest_difference(model, drawn) < 1e-6


def test_at_another_temperature_they_are_of_the_tempered_policy(model):
    drawn = roll(model, replace(SAMPLING, temperature=0.7, top_k=40))
    rows = packed_rows([[document(sequence)] for sequence in drawn.sequences()], PAD)
    with torch.no_grad():
        trained_M = PolicyModel(model)(rows, Readout(0.7)).logprobs_M
    assert (trained_M - drawn.drawn.logprobs_BR[drawn.drawn.mask_BR]).abs().max() < 1e-5


def test_blocks_are_whole_and_what_is_inserted_is_no_target(model, rollout):
    """By the text alone: of each block that ends three paths; the first path's tag is drawn, the others' are not."""
    ends = 0
    for row, ids in enumerate(responses(rollout)):
        inserted = rollout.inserted_BR[row].tolist()
        for block in drawn_blocks(torch.tensor(ids), TAGS):
            assert [inserted[path] for path in block.paths] == [False, True, True][: len(block.paths)]
            if block.end is not None:
                assert len(block.paths) == 3 and ids[block.end] == CLOSE and inserted[block.end]
                inserted[block.end] = False
                ends += 1
            for path in block.paths:
                inserted[path] = False
        # What is left are ends of paths that came to their limit or drew the end of a response.
        assert all(ids[column] == END_PATH for column, is_inserted in enumerate(inserted) if is_inserted)
        assert bool(rollout.ended_B[row]) == (ids[-1] == END)
    assert ends > 200
    targets = torch.cat([sequence.input_ids[sequence.is_target] for sequence in rollout.sequences()])
    assert torch.equal(targets, rollout.response_ids_BR[rollout.response_mask_BR & ~rollout.inserted_BR])


def test_the_limit_counts_the_longest_path_of_a_block_alone(model, rollout):
    positions = []
    for sequence in rollout.sequences():
        prompt = len(split(sequence)[0])
        ends = [part.first_position + len(part.tokens) for part in document(sequence).segments]
        positions.append(max(ends) - prompt)
    assert rollout.formed.positions_B.tolist() == positions and max(positions) == SAMPLING.max_new_tokens
    assert torch.equal(rollout.spans_B, rollout.formed.positions_B)
    assert rollout.response_lengths_B.max() > SAMPLING.max_new_tokens  # more tokens than positions


def test_a_path_has_its_own_limit(model):
    limited = roll(model, replace(SAMPLING, form=ParallelPaths(PathSampling(TAGS, 2, most_tokens=4))), samples=20)
    lengths = set()
    for ids in responses(limited):
        for block in drawn_blocks(torch.tensor(ids), TAGS):
            if block.end is not None:
                bounds = [*block.paths, block.end]
                lengths |= {after - before for before, after in zip(bounds[:-1], bounds[1:], strict=True)}
    assert lengths == {2, 3, 4} and largest_difference(model, limited) < 1e-5


def test_a_path_that_draws_the_end_of_a_response_ends_itself():
    """And the trunk goes on."""
    model = model_that_thinks(_2=3.0)
    drawn = roll(model, samples=25)
    found = 0
    for row, ids in enumerate(responses(drawn)):
        for column in [column for column, token in enumerate(ids[:-1]) if token == END]:
            assert ids[column + 1] == END_PATH and drawn.inserted_BR[row, column + 1]
            found += 1
    assert found > 5 and largest_difference(model, drawn) < 1e-5


def test_tags_out_of_place_are_text():
    model = model_that_thinks(_3=3.0, _4=3.0, _5=3.0, _6=3.0)
    drawn = roll(model, samples=25)
    counts = [len(drawn_blocks(torch.tensor(ids), TAGS)) for ids in responses(drawn)]
    tags = [sum(token == CLOSE for token in ids) for ids in responses(drawn)]
    assert sum(tags) > 2 * sum(counts) and max(counts) > 1 and largest_difference(model, drawn) < 1e-5


def test_without_a_block_it_is_the_response_in_one_piece():
    model = model_that_thinks(_3=-100.0)
    one, other = roll(model), roll(model, replace(SAMPLING, form=None))
    assert responses(one) == responses(other) and not one.inserted_BR.any()
    assert torch.allclose(one.sampled_logprobs_BR, other.sampled_logprobs_BR, atol=1e-5)
    assert torch.equal(one.formed.positions_B, other.response_lengths_B) and torch.equal(one.ended_B, other.ended_B)


def test_a_response_depends_on_its_prompt_and_its_seed_alone():
    """In float64, where no draw is tipped by rounding: each prompt alone, all together, and in another order."""
    model, lengths = model_that_thinks(dtype=torch.float64), (3, 11, 1, 7)
    ids_BP, mask_BP = prompts(lengths)
    engine, together = TransformersRollout(), roll(model, lengths=lengths)
    rows = [responses(together)[4 * prompt : 4 * prompt + 4] for prompt in range(4)]
    for prompt in range(4):
        own = ids_BP[prompt][mask_BP[prompt]].unsqueeze(0)
        seeds = range(4 * prompt, 4 * prompt + 4)
        alone = engine.roll_out(model, RolloutRequest(own, torch.ones_like(own).bool(), SAMPLING, seeds, 4))
        assert responses(alone) == rows[prompt]
    order = [2, 0, 3, 1]
    seeds = [4 * prompt + sample for prompt in order for sample in range(4)]
    turned = engine.roll_out(model, RolloutRequest(ids_BP[order], mask_BP[order], SAMPLING, seeds, 4))
    assert responses(turned) == [response for prompt in order for response in rows[prompt]]
    paths = [
        tuple(ids[start:stop])
        for ids in responses(together)
        for block in drawn_blocks(torch.tensor(ids), TAGS)
        for start, stop in zip(block.paths, (*block.paths[1:], block.end), strict=True)
    ]
    assert len(set(paths)) > len(paths) // 2  # each path has numbers of its own


def test_paths_cost_the_steps_of_the_longest(model):
    """One forward of one token a row for each position; in one piece it would be one for each token."""
    for seed in range(40):
        drawn, shapes = shapes_of_inputs(model, lambda seed=seed: roll(model, lengths=(5,), samples=1, seeds=[seed]))
        steps = [shape for shape in shapes[1:] if shape[1] == 1]
        assert len(steps) == len(shapes) - 1 and len(steps) <= int(drawn.formed.positions_B[0])
        if int(drawn.response_lengths_B[0]) > 1.5 * len(steps) > 15:
            break
    else:
        raise AssertionError("no response had long paths")


@pytest.mark.parametrize(("family", "said"), [("gemma2", "see the last tokens alone"), ("mamba", "a layer of its own")])
def test_a_family_whose_cache_does_not_hold_all_tokens_is_refused(family, said):
    engine, model = TransformersRollout(), tiny_causal_lm(family)
    read_own_forward(model)
    with pytest.raises(ThreestepError, match=f"--parallel_thinking draws paths side by side, .* does not: .*{said}"):
        engine.check(contextlib.nullcontext(model), own_forward_of(model), PATHS)


def test_a_family_that_takes_no_masks_is_refused():
    engine, model = TransformersRollout(), tiny_causal_lm("bloom")
    read_own_forward(model)
    with pytest.raises(ThreestepError, match="BloomForCausalLM does not: the family makes its masks itself"):
        engine.check(contextlib.nullcontext(model), own_forward_of(model), PATHS)


def test_a_model_that_holds_all_tokens_is_taken_and_other_engines_draw_none(model):
    engine = TransformersRollout()
    own = tiny_causal_lm("llama")
    read_own_forward(own)
    engine.check(contextlib.nullcontext(own), own_forward_of(own), PATHS)
    assert TransformersRollout.draws_forms and not RolloutEngine.draws_forms


def test_rows_keep_their_places_where_they_can():
    rows = [(0, "a"), (2, "b"), (2, "b2"), (4, "c"), (1, "d")]
    assert arranged(rows) == [(0, "a"), (1, "d"), (2, "b"), (2, "b2"), (4, "c")]
    assert arranged([(3, "x"), (1, "y")]) == [(3, "x"), (1, "y")] and arranged([]) == []
