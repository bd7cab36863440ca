"""The pictures of samples: kept once, small, in bounds, by the main rank alone."""

from __future__ import annotations

import hashlib
import io

import pytest
from PIL import Image

from tests.support.image_readers import picture, reader_of, tokenizer_of
from threestep.plugins.images.data.reader import PixelReader
from threestep.plugins.images.run import sample_pictures
from threestep.plugins.images.run.sample_pictures import SamplePictures
from threestep.plugins.samples.samples import SampleTexts
from training.utils.contracts.documents import MediaSpan
from training.utils.data.rows.media_store import HeldMedia
from training.utils.run.run_folder import RunFolder

LARGE, SMALL = picture(560, 280), picture(56, 28, (0, 0, 200))


@pytest.fixture(scope="module")
def pixels() -> PixelReader:
    held = HeldMedia()
    for data in (LARGE, SMALL):
        held.add(hashlib.sha256(data).digest(), data)
    return PixelReader(reader_of("qwen2_vl", tokenizer_of("qwen2_vl")), held)


def span(key: int) -> MediaSpan:
    return MediaSpan(3, 2, (1, 2), key)


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "sample_pictures").glob("*")}


def test_pictures_are_kept_small_and_named_by_their_bytes(tmp_path, pixels):
    samples = SampleTexts(keeper=SamplePictures(RunFolder(tmp_path, True), pixels).names)
    assert samples.media([span(0), span(1), span(0)]).names == [name_of(LARGE), name_of(SMALL), name_of(LARGE)]
    kept = files(tmp_path)
    sizes = {name: Image.open(io.BytesIO(data)).size for name, data in kept.items()}
    assert sizes == {f"{name_of(LARGE)}.png": (128, 64), f"{name_of(SMALL)}.png": (56, 28)}
    assert samples.media([]).names == [] == SampleTexts().media([span(0)]).names


def test_a_run_that_goes_on_keeps_what_is_there_and_no_more_than_the_bound(tmp_path, pixels, monkeypatch):
    RunFolder(tmp_path, True).write_medium(f"{name_of(LARGE)}.png", b"as it was", "picture")
    monkeypatch.setattr(sample_pictures, "MOST_PICTURES", 1)
    assert SamplePictures(RunFolder(tmp_path, True), pixels).names([span(0), span(1)]) == [
        name_of(LARGE),
        name_of(SMALL),
    ]
    assert files(tmp_path) == {f"{name_of(LARGE)}.png": b"as it was"}


def test_other_ranks_name_them_and_write_nothing(tmp_path, pixels):
    assert SamplePictures(RunFolder(tmp_path, False), pixels).names([span(1)]) == [name_of(SMALL)]
    assert not (tmp_path / "sample_pictures").exists()
