"""Pixels and places of images: moved with their rows, in left-padded prompts, replayed, and in a record."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.tiny_models import tiny_causal_lm
from tests.support.vision_models import with_pixels
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts
from threestep.plugins.audit.recording.sequences import sequences_of
from threestep.plugins.images.pixels import ImagePixels
from threestep.plugins.images.prompts import PromptImages, left_padded_axes
from threestep.plugins.images.recorded import PixelScale, images_of_rank, scale_of
from threestep.plugins.programs.new_model import image_processor
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import MediaSpan, TokenSequence, plain, shared_prompt
from training.utils.contracts.rollout_engine import RolloutRequest, rolled_out
from training.utils.contracts.rows import PromptRow
from training.utils.contracts.token_rows import position_axes
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import packed_rows


def run(length, *images, is_target=False):
    return TokenSequence(torch.arange(length), torch.full((length,), is_target), images)


def image(begin, height, width, key=0):
    return MediaSpan(begin, height * width, (height, width), key)


def test_rows_move_with_their_pixels_and_places_of_left_padded_ones_by_hand():
    """Two tokens, 2 x 3 of an image, two tokens; and one token of text. Padding is at 0."""
    rows = packed_rows([[plain(run(5, image(1, 1, 2)))]], 0)
    pixels = ImagePixels(torch.zeros(8, 4), torch.tensor([[1, 2, 4]]))
    moved = with_pixels(rows, pixels).to("meta")
    assert moved.media.read.values.is_meta and moved.media.read.grids_I3.is_meta and moved.media.axes_3NT.is_meta
    assert moved.media.spans == rows.media.spans
    span = MediaSpan(2, 6, (2, 3), 0)
    mask_BP = torch.arange(10) >= torch.tensor([[0], [9]])
    axes_3BP = left_padded_axes(mask_BP, [(span,), ()])
    assert axes_3BP[:, 0].tolist() == position_axes(10, [span]).tolist()
    assert axes_3BP[:, 1].tolist() == [[0] * 10] * 3
    mask_BP = torch.arange(11) >= torch.tensor([[1], [9]])
    axes_3BP = left_padded_axes(mask_BP, [(span,), ()])
    assert axes_3BP[1].tolist() == [[0, 0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0] * 10 + [1]]


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm("llama")


def pictured(digest: str) -> RolloutRequest:
    ids_BP, mask_BP = prompts((3, 5))
    rows = [PromptRow(0, np.arange(3), "", None), PromptRow(1, np.arange(5), "", None, media_digests=(digest,))]
    images = PromptImages(((), (MediaSpan(1, 2),)), lambda keys: ImagePixels(torch.zeros(1)))
    return RolloutRequest(ids_BP, mask_BP, PLAIN, range(4), 2, rows, images)


def test_rollouts_of_other_pictures_are_refused(tmp_path, model):
    class Blind(TransformersRollout):
        def roll_out(self, model, request):
            return super().roll_out(model, replace(request, media=None))

    DumpingRollout(Blind(), tmp_path, 0).roll_out(model, pictured("ab12"))
    replayed = rolled_out(ReplayRollout(tmp_path, 0), model, pictured("ab12"))
    assert [each.media for each in replayed.sequences()] == [(), (), (MediaSpan(1, 2),), (MediaSpan(1, 2),)]
    for other in (pictured("cd34"), replace(pictured("ab12"), media=None)):
        with pytest.raises(ThreestepError, match="holds responses to prompts whose images differ from this run's"):
            ReplayRollout(tmp_path, 0).roll_out(model, other)


def _run(tokens: int, *images: MediaSpan, is_target: bool = False) -> TokenSequence:
    return TokenSequence(torch.arange(tokens), torch.full((tokens,), is_target), media=images)


def _rank() -> dict[str, np.ndarray]:
    """A text, two responses to a prompt with two images, and a text with one; each image has its number as values."""
    prompt = _run(8, MediaSpan(1, 2, key=3), MediaSpan(5, 1, key=1))
    pair = shared_prompt(prompt, [_run(2, is_target=True), _run(3, is_target=True)])
    rows = packed_rows([[plain(_run(2)), pair], [plain(_run(4, MediaSpan(0, 3, key=2)))]], 0)
    assert rows.media is not None
    values = torch.tensor([[0.0], [0.0], [1.0], [2.0], [2.0]]).expand(5, 12)
    pixels = ImagePixels(values, torch.tensor([[1, 1, 2], [1, 1, 1], [1, 2, 1]]))
    rows = replace(rows, media=replace(rows.media, read=pixels))
    found = sequences_of(rows, keeps_media=True)
    return {"lengths": found.lengths_S.numpy(), **{name: value.numpy() for name, value in found.media.items()}}


def test_an_image_of_a_shared_prompt_stands_in_each_sequence():
    rank = _rank()
    assert rank["lengths"].tolist() == [2, 10, 11, 4]
    assert rank["media_begins"].tolist() == [3, 7, 13, 17, 23]
    found = images_of_rank(rank)
    assert sorted(found) == [1, 2, 3]
    for sequence in (1, 2):
        own = found[sequence]
        assert own.begins_I.tolist() == [1, 5] and own.tokens_I.tolist() == [2, 1] and own.counts_I.tolist() == [2, 1]
        assert own.values_XN[:, 0].tolist() == [0.0, 0.0, 1.0]
    assert found[3].begins_I.tolist() == [0] and found[3].grids_I3.tolist() == [[1, 2, 1]]
    assert images_of_rank({"lengths": rank["lengths"]}) == {}


def test_a_picture_is_shown_as_the_model_was_given_it(tmp_path):
    rng = np.random.default_rng(0)
    colours = np.repeat(np.repeat(rng.integers(0, 256, (2, 3, 3), dtype=np.uint8), 28, axis=0), 28, axis=1)
    processor = image_processor(16)
    given = processor(images=[Image.fromarray(colours)], return_tensors="np")
    values, grid = given["pixel_values"], given["image_grid_thw"]
    rank = {
        "lengths": np.array([6]), "media_begins": np.array([0]), "media_tokens": np.array([6]),
        "media_counts": np.array([len(values)]), "media_grids": np.asarray(grid), "media_values": np.asarray(values),
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": list(processor.image_mean), "image_std": list(processor.image_std)})
    )
    scale, config = scale_of(tmp_path), SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    assert scale == PixelScale(list(processor.image_mean), list(processor.image_std))
    (address,) = images_of_rank(rank)[0].shown(config, scale)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))
    assert shown.shape == colours.shape
    assert np.abs(shown.astype(int) - colours).max() <= 1
    assert scale_of(tmp_path / "none") is None and images_of_rank(rank)[0].shown(config, None)[0] != address


def test_tiles_are_squares_of_three_colours():
    values = np.concatenate([np.zeros((1, 48)), np.ones((2, 48))])
    rank = {
        "lengths": np.array([4, 3]), "media_begins": np.array([1, 4]), "media_tokens": np.array([2, 1]),
        "media_counts": np.array([1, 2]), "media_values": values,
    }  # fmt: skip
    config = SimpleNamespace(model_type="llava", vision_config=SimpleNamespace())
    given = images_of_rank(rank)[0].inputs(config, 3, ("token_type_ids",), torch.float64)
    assert given["pixel_values"].shape == (1, 3, 4, 4) and given["token_type_ids"].tolist() == [[0, 1, 1]]
    assert images_of_rank(rank)[1].inputs(config, 3, (), torch.float64)["pixel_values"].shape == (2, 3, 4, 4)
    assert len(images_of_rank(rank)[1].shown(config, None)) == 1
