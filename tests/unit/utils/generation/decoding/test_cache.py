"""A cache with room ahead holds what transformers' own holds, in fewer copies."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests.support.tiny_models import FAMILIES, tiny_causal_lm
from training.utils.generation.decoding.cache import (
    RoomyLayer,
    StepMasks,
    compacted,
    leave,
    moves_when_leaving,
    reorder,
    roomy_cache,
    windows_of,
)

CPU = torch.device("cpu")


def states(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """[A, H, T, D]"""
    return torch.randn(rows, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))


def test_who_moves_where():
    # Rows 1 and 4 of six leave: four stay, and the hole at 1 is filled by row 5, the only one beyond the fourth.
    moves = moves_when_leaving([False, True, False, False, True, False], CPU)
    assert (moves.count, moves.holes.tolist(), moves.movers.tolist()) == (4, [1], [5])
    assert moves.order.tolist() == [0, 5, 2, 3]
    assert compacted(torch.arange(6), moves).tolist() == [0, 5, 2, 3]
    assert moves_when_leaving([True, False, True], CPU).order.tolist() == [1]
    assert moves_when_leaving([True, True], CPU).count == 0


def test_a_layer_holds_what_a_dynamic_layer_holds():
    """A prompt, three samples of it, 200 tokens, and rows that leave on the way."""
    ours, theirs = RoomyLayer(limit_tokens=300), DynamicLayer()
    rows = 2
    for layer in (ours, theirs):
        layer.update(states(rows, 7, 0), states(rows, 7, 1))
    order = torch.arange(rows).repeat_interleave(3)
    for layer in (ours, theirs):
        layer.reorder_cache(order)
    rows = 6
    for step in range(200):
        key, value = states(rows, 1, 2 * step + 2), states(rows, 1, 2 * step + 3)
        for mine, yours in zip(ours.update(key, value), theirs.update(key, value), strict=True):
            assert torch.equal(mine, yours)
        assert ours.get_seq_length() == theirs.get_seq_length() == 8 + step
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        if step in (0, 60, 61, 130):
            moves = moves_when_leaving([row == 1 for row in range(rows)], CPU)
            ours.leave(moves)
            theirs.reorder_cache(moves.order)
            rows -= 1
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_a_step_copies_nothing_and_a_row_that_leaves_copies_one():
    layer = RoomyLayer(limit_tokens=500)
    layer.update(states(4, 10, 0), states(4, 10, 1))
    layer.update(states(4, 1, 2), states(4, 1, 3))
    place = layer.keys.data_ptr()
    for _ in range(20):
        layer.update(states(4, 1, 2), states(4, 1, 3))
    first_row = layer.keys[0].clone()
    layer.leave(moves_when_leaving([False, True, False, False], CPU))
    assert layer.keys.data_ptr() == place and layer.keys.shape == (3, 2, 31, 4)
    assert torch.equal(layer.keys[0], first_row)


def test_room_grows_with_what_is_held_and_ends_at_the_limit():
    layer = RoomyLayer(limit_tokens=1000)
    layer.update(states(1, 10, 0), states(1, 10, 1))
    rooms = []
    for step in range(990):
        layer.update(states(1, 1, 2), states(1, 1, 3))
        rooms.append(layer._rooms[0].shape[-2])
        # Never more than 128 tokens or a quarter beyond what was held when the room was made.
        assert 11 + step <= rooms[-1] <= max(11 + step + 128, 1.25 * (11 + step))
    assert rooms[-1] == 1000 and len(set(rooms)) < 14


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_that_have_room_are_those_without_a_window(family):
    model = tiny_causal_lm(family)
    ours, theirs = roomy_cache(model, 50).layers, DynamicCache(config=model.config).layers
    assert [type(layer) for layer in ours] == [
        RoomyLayer if type(layer) is DynamicLayer else type(layer) for layer in theirs
    ]
    assert any(isinstance(layer, RoomyLayer) for layer in ours)


def test_a_whole_cache_is_reordered_and_left():
    model = tiny_causal_lm("gemma3_text")  # a window of 8, and full attention
    caches = roomy_cache(model, 40), DynamicCache(config=model.config)
    ids = torch.arange(3, 3 + 2 * 10).view(2, 10)
    moves = moves_when_leaving([True, False, False, False], CPU)
    with torch.no_grad():
        for cache in caches:
            model(input_ids=ids, past_key_values=cache)
        reorder(caches[0], torch.tensor([0, 0, 1, 1]))
        leave(caches[0], moves)
        caches[1].reorder_cache(torch.tensor([1, 0, 1]))
        ours, theirs = (model(input_ids=ids[:1].T[:3], past_key_values=cache).logits for cache in caches)
    torch.testing.assert_close(ours, theirs)


SEEN = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]).bool()


def shown(mask_A11L: torch.Tensor) -> list[list[int]]:
    assert set(mask_A11L.unique().tolist()) <= {0.0, float("-inf")}
    return (mask_A11L[:, 0, 0] == 0).int().tolist()


def test_one_kind_is_a_mask_and_several_are_masks_by_name():
    masks = StepMasks({"": None}, SEEN, torch.bfloat16)
    assert masks.at(4).dtype == torch.bfloat16 and masks.at(4).shape == (3, 1, 1, 4)
    assert shown(masks.at(4)) == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    masks.leave(moves_when_leaving([True, False, False], SEEN.device))  # the last row fills the hole
    assert shown(masks.at(5)) == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    both = StepMasks({"full_attention": None, "sliding_attention": 3}, SEEN, torch.float32).at(4)
    assert shown(both["full_attention"]) == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert shown(both["sliding_attention"]) == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]


def test_windows_of_a_family_and_layers_of_other_kinds():
    model = tiny_causal_lm("mamba")
    with pytest.raises(ValueError, match="a custom layer type"):
        windows_of(model.config, roomy_cache(model, 20))
    two = DynamicCache()
    two.layers = [DynamicSlidingWindowLayer(4), DynamicSlidingWindowLayer(5)]
    with pytest.raises(ValueError, match="layers of the same type have different windows"):
        windows_of(LlamaConfig(), two)
    for family, windows in (
        ("llama", {"": None}),
        ("qwen3", {"full_attention": None}),
        ("gemma3_text", {"full_attention": None, "sliding_attention": 8}),
    ):
        model = tiny_causal_lm(family)
        assert windows_of(model.config, roomy_cache(model, 20)) == windows
