"""Images as rows hold them: what is read, and what is refused by a sentence."""

from __future__ import annotations

import base64
import os
from urllib.parse import quote

import pytest
from PIL import Image

from threestep.plugins.images.data.decoding import decoded
from threestep.plugins.images.data.values import MOST_FILE_BYTES, image_bytes
from training.utils.data.formats.media import BadConversation
from training.utils.data.formats.messages import image_values

WHERE = "rows.jsonl, line 3, image 1"


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    (data / "pictures").mkdir(parents=True)
    (data / "pictures" / "a.png").write_bytes(b"PICTURE")
    (tmp_path / "outside.png").write_bytes(b"SECRET")
    return data


def test_columns_hold_lists_json_text_or_one_image():
    assert image_values({"images": [b"a", b"b"]}, WHERE) == [b"a", b"b"]
    assert image_values({"image": b"a", "images": []}, WHERE) == [b"a"]
    assert image_values({"images": '["a.png", "b.png"]'}, WHERE) == ["a.png", "b.png"]
    for nothing in (None, "", [], "[]", ()):
        assert image_values({"images": nothing}, WHERE) == []
    with pytest.raises(BadConversation, match="line 3, image 1: expected images in one column, got both"):
        image_values({"image": b"a", "images": [b"b"]}, WHERE)


def test_bytes_structs_and_paths_inside_the_folder_are_read(folder):
    for value in (b"PICTURE", bytearray(b"PICTURE"), {"bytes": b"PICTURE", "path": "none.png"}):
        assert image_bytes(value, None, WHERE) == b"PICTURE"
    os.symlink("a.png", folder / "pictures" / "same.png")
    paths = ("pictures/a.png", "./pictures/a.png", "pictures/same.png")
    for value in (*paths, {"bytes": None, "path": paths[0]}, {"image": paths[0]}):
        assert image_bytes(value, folder, WHERE) == b"PICTURE"


PLAIN = base64.b64encode(b"PICTURE?>~").decode()


@pytest.mark.parametrize(
    "value",
    [
        f"data:image/png;base64,{PLAIN}",
        f"DATA:IMAGE/PNG;BASE64,{PLAIN}",
        f"data:;base64,{PLAIN}",
        f"data:image/png;charset=utf-8;name=a.png;base64,{PLAIN}",
        f" data:image/jpeg;base64,{PLAIN[:4]}\r\n{PLAIN[4:]}\n",
        f"data:image/png;base64,{PLAIN.rstrip('=')}",
        f"data:image/png;base64,{quote(PLAIN, safe='')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(b'PICTURE?>~').decode()}",
        "data:image/png,PICTURE%3F%3E~",
        {"url": f"data:image/png;base64,{PLAIN}", "detail": "auto"},
        {"image_url": {"url": f"data:image/png;base64,{PLAIN}"}},
        {"bytes": None, "path": f"data:image/png;base64,{PLAIN}"},
        {"type": "base64", "media_type": "image/png", "data": PLAIN},
        {"source": {"type": "base64", "media_type": "image/png", "data": PLAIN}},
        {"base64": PLAIN},
        {"base64": f"data:image/png;base64,{PLAIN}"},
    ],
)
def test_pictures_inside_of_a_text(value):
    assert image_bytes(value, None, WHERE) == b"PICTURE?>~"


def test_a_pil_image_keeps_its_pixels():
    image = Image.new("RGB", (3, 2))
    image.putpixel((2, 1), (1, 2, 3))
    read = decoded(image_bytes({"image": image}, None, WHERE), WHERE)
    assert read.size == (3, 2) and read.tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("https://example.org/a.png", "got the address 'https://example.org/a.png'; no address is fetched"),
        ("file:///etc/passwd", "got the address"),
        ("data:image/png;base64", "expected data:image/...;base64,..., got 'data:image/png;base64' without a comma"),
        ("data:text/html,hi", "expected a picture, got a data URL of the type 'text/html'"),
        ("data:image/png;base64,AAAAA", "expected a picture in base64, which cannot be decoded"),
        ("data:image/png;base64,AA*A", "expected a picture in base64, which cannot be decoded"),
        ("data:image/png;base64,", "expected an image, got no bytes"),
        ("data:image/png;base64," + "A" * (2 * MOST_FILE_BYTES + 1), "expected a picture of at most"),
        ({"base64": b"AAAA"}, "expected a picture in base64 as text, got"),
        ({"type": "base64", "data": "\u00e4"}, "expected a picture in base64, which cannot be decoded"),
        ({"path": "HTTP://example.org/a.png"}, "got the address"),
        ("/etc/passwd", "absolute paths and '..' are refused"),
        ("../outside.png", "absolute paths and '..' are refused"),
        ("pictures/../../outside.png", "absolute paths and '..' are refused"),
        ("link.png", "is a link out of the data's folder"),
        ("linked/outside.png", "is a link out of the data's folder"),
        ("round.png", "cannot be read"),
        ("none.png", "cannot be read: No such file or directory"),
        ("pictures", "expected a file, got 'pictures', which is none"),
        ("pipe", "expected a file, got 'pipe', which is none"),
        ("a\0b.png", "expected a path, got"),
        ("x" * 5000, "cannot be read"),
        ("", "expected a path, got ''"),
        ("huge.png", f"expected an image of at most {MOST_FILE_BYTES:,} bytes"),
        (b"", "expected an image, got no bytes"),
        ({}, "expected an object with 'bytes' or 'path', got an empty object"),
        ({"url": "https://example.org/a.png"}, "got the address 'https://example.org/a.png'; no address is fetched"),
        ({"link": "a"}, "expected an object with 'bytes' or 'path', got 'link'"),
        ({"image": {"image": {"image": {"bytes": b"a"}}}}, "expected an object with 'bytes' or 'path'"),
        (7, "expected bytes, a data URL, a path inside the data's folder"),
        (None, "expected bytes, a data URL, a path inside the data's folder"),
        ([b"a"], "expected bytes, a data URL, a path inside the data's folder"),
    ],
)
def test_what_is_refused(value, said, folder):
    os.symlink("../outside.png", folder / "link.png")
    os.symlink("..", folder / "linked")
    os.symlink("round.png", folder / "round.png")
    os.mkfifo(folder / "pipe")
    with open(folder / "huge.png", "wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)  # a hole
    with pytest.raises(BadConversation) as error:
        image_bytes(value, folder, WHERE)
    assert str(error.value).startswith(f"{WHERE}: ") and said in str(error.value) and "\n" not in str(error.value)


def test_a_path_of_rows_without_a_folder_is_refused():
    with pytest.raises(BadConversation, match="expected the bytes of an image, got the path 'a.png'"):
        image_bytes("a.png", None, WHERE)
