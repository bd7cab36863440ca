"""Pictures: formats, bounds, Exif, RGB; and damaged ones, of which each ends in a sentence or in pixels."""

from __future__ import annotations

import io
import random
import struct
import zlib

import pytest
from PIL import Image

from threestep.plugins.images.data.decoding import FORMATS, decoded, encoded, picture_size
from training.utils.data.formats.media import BadConversation

WHERE = "rows.jsonl, line 3, image 1"


def picture(mode="RGB", size=(12, 8)):
    """Different in each corner."""
    image = Image.new("RGB", size, (10, 20, 30))
    image.paste((200, 0, 0), (0, 0, size[0] // 2, size[1] // 2))
    image.paste((0, 200, 0), (size[0] // 2, 0, size[0], size[1] // 2))
    return image.convert(mode)


def stored(image, name="PNG", **options):
    file = io.BytesIO()
    image.save(file, format=name, **options)
    return file.getvalue()


def rotated(name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return stored(picture(), name, exif=exif)


def empty_png(width, height):
    """A few bytes whose header promises many pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_becomes_rgb(name):
    data = stored(picture(), name)
    image = decoded(data, WHERE)
    assert image.mode == "RGB" and image.size == (12, 8)
    size = picture_size(data, WHERE)
    assert (size.format, size.width, size.height) == (name, 12, 8)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA"])
def test_modes_of_8_bits_become_rgb(mode):
    image = picture(mode)
    assert decoded(stored(image), WHERE).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_and_the_header_knows_it(orientation):
    data = rotated("PNG", orientation)
    image, size = decoded(data, WHERE), picture_size(data, WHERE)
    assert image.size == (size.width, size.height) == ((8, 12) if orientation > 4 else (12, 8))
    turns = [None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM]
    turns += [Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE]
    turn = [*turns, Image.Transpose.ROTATE_90][orientation - 1]
    assert image.tobytes() == (picture() if turn is None else picture().transpose(turn)).tobytes()
    assert decoded(encoded(Image.open(io.BytesIO(data)), WHERE), WHERE).tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (empty_png(12_000, 12_000), "expected an image of 1 to 50,000,000 pixels, got 12,000 x 12,000"),
        (empty_png(60_000, 60_000), "pixels"),
        (stored(picture(), "TIFF"), "expected an image (JPEG, PNG, WEBP, GIF, BMP), got other bytes"),
        (b"%PDF-1.4", "got other bytes"),
        (b"<svg/>", "got other bytes"),
        (stored(picture())[:60], "the image cannot be decoded"),
        (stored(picture(), "GIF", save_all=True, append_images=[picture("L")]), "got an animation (GIF)"),
        (stored(picture(), "WEBP", save_all=True, append_images=[picture("L")]), "got an animation (WEBP)"),
        (stored(Image.new("I;16", (4, 4))), "expected 8 bits a channel, got an image of mode 'I;16'"),
    ],
)
def test_what_is_refused(data, said):
    with pytest.raises(BadConversation) as error:
        decoded(data, WHERE)
    assert str(error.value).startswith(f"{WHERE}: ") and said in str(error.value) and "\n" not in str(error.value)


def test_pixels_are_bounded_before_anything_is_decoded(monkeypatch):
    def loads(*args):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", loads)
    for read in (decoded, picture_size):
        with pytest.raises(BadConversation, match="expected an image of 1 to 95 pixels, got 12 x 8"):
            read(stored(picture()), WHERE, 95)


def test_a_bound_holds_for_pil_images_too():
    with pytest.raises(BadConversation, match="expected an image of 1 to 95 pixels, got 12 x 8"):
        encoded(picture(), WHERE, 95)


def test_damaged_pictures_end_in_a_sentence_or_in_pixels():
    draw = random.Random(0)
    whole = [stored(picture("P")), *(stored(picture(size=(24, 16)), name) for name in FORMATS), rotated("JPEG", 6)]
    ends = {"pixels": 0, "sentence": 0}
    for _ in range(500):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        try:
            image = decoded(bytes(data), WHERE)
        except BadConversation as error:
            assert str(error).startswith(f"{WHERE}: ") and "\n" not in str(error)
            ends["sentence"] += 1
        else:
            assert image.mode == "RGB" and image.size[0] * image.size[1] <= 50_000_000
            ends["pixels"] += 1
    assert min(ends.values()) > 100, ends
