"""Images as rows hold them, in memory and behind addresses: what is read, what is refused, and damaged ones."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import socket
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from PIL import Image

from threestep.inputs import address_of_rows
from threestep.plugins.images.data import fetching
from threestep.plugins.images.data.decoding import FORMATS, decoded, encoded, picture_size
from threestep.plugins.images.data.fetching import fetched
from threestep.plugins.images.data.values import MOST_FILE_BYTES, image_bytes
from training.utils.base.errors import ThreestepError
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
        f"data:image/png;charset=utf-8;name=a.png;base64,{PLAIN}",
        f" data:image/jpeg;base64,{PLAIN[:4]}\r\n{PLAIN[4:]}\n",
        f"data:image/png;base64,{PLAIN.rstrip('=')}",
        f"data:image/png;base64,{quote(PLAIN, safe='')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(b'PICTURE?>~').decode()}",
        "data:image/png,PICTURE%3F%3E~",
        {"url": f"data:image/png;base64,{PLAIN}", "detail": "auto"},
        {"type": "base64", "media_type": "image/png", "data": PLAIN},
        {"source": {"type": "base64", "media_type": "image/png", "data": PLAIN}},
        {"base64": PLAIN},
        {"base64": f"data:image/png;base64,{PLAIN}"},
    ],
)
def test_pictures_inside_of_a_text(value):
    assert image_bytes(value, None, WHERE) == b"PICTURE?>~"


def test_pictures_of_pil_and_paths_without_a_folder():
    image = Image.new("RGB", (3, 2))
    image.putpixel((2, 1), (1, 2, 3))
    read = decoded(image_bytes({"image": image}, None, WHERE), WHERE)
    assert read.size == (3, 2) and read.tobytes() == image.tobytes()
    with pytest.raises(BadConversation, match="expected the bytes of an image, got the path 'a.png'"):
        image_bytes("a.png", None, WHERE)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("https://example.org/a.png", "got the URL 'https://example.org/a.png'; URLs are fetched only"),
        ("data:image/png;base64", "expected data:image/...;base64,..., got 'data:image/png;base64' without a comma"),
        ("data:text/html,hi", "expected an image, got a data URL of the type 'text/html'"),
        ("data:image/png;base64,AAAAA", "expected a base64-encoded image, but it cannot be decoded"),
        ("data:image/png;base64,", "expected an image, got no bytes"),
        ("data:image/png;base64," + "A" * (2 * MOST_FILE_BYTES + 1), "expected an image of at most"),
        ({"base64": b"AAAA"}, "expected a base64-encoded image as a string, got"),
        ({"type": "base64", "data": "\u00e4"}, "expected a base64-encoded image, but it cannot be decoded"),
        ({"path": "HTTP://example.org/a.png"}, "got the URL"),
        ("/etc/passwd", "absolute paths and '..' are refused"),
        ("../outside.png", "absolute paths and '..' are refused"),
        ("link.png", "is a link to a place outside the data's folder"),
        ("round.png", "cannot be read"),
        ("none.png", "cannot be read: No such file or directory"),
        ("pipe", "expected a file, but 'pipe' is not a file"),
        ("a\0b.png", "expected a path, got"),
        ("x" * 5000, "cannot be read"),
        ("", "expected a path, got ''"),
        ("huge.png", f"expected an image of at most {MOST_FILE_BYTES:,} bytes"),
        (b"", "expected an image, got no bytes"),
        ({}, "expected an object with 'bytes' or 'path', got an empty object"),
        ({"link": "a"}, "expected an object with 'bytes' or 'path', got 'link'"),
        ({"image": {"image": {"image": {"bytes": b"a"}}}}, "expected an object with 'bytes' or 'path'"),
        (None, "expected bytes, a data URL, a path inside the data's folder"),
    ],
)
def test_what_is_refused(value, said, folder):
    os.symlink("../outside.png", folder / "link.png")
    os.symlink("round.png", folder / "round.png")
    os.mkfifo(folder / "pipe")
    with open(folder / "huge.png", "wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)  # a hole
    with pytest.raises(BadConversation) as error:
        image_bytes(value, folder, WHERE)
    assert str(error.value).startswith(f"{WHERE}: ") and said in str(error.value) and "\n" not in str(error.value)


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
        (stored(picture())[:60], "the image cannot be decoded"),
        (stored(picture(), "GIF", save_all=True, append_images=[picture("L")]), "got an animation (GIF)"),
        (stored(picture(), "WEBP", save_all=True, append_images=[picture("L")]), "got an animation (WEBP)"),
        (stored(Image.new("I;16", (4, 4))), "expected 8 bits per channel, got an image of mode 'I;16'"),
    ],
)
def test_what_cannot_be_decoded(data, said):
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


HOSTS = {"a.org": ["93.184.216.34"], "inside": ["10.0.0.7"], "both": ["93.184.216.34", "127.0.0.1"],
         "six": ["::1"], "mapped": ["::ffff:192.168.0.1"], "meta": ["169.254.169.254"]}  # fmt: skip


class Answer:
    def __init__(self, status=200, body=b"PICTURE", location=None):
        self.status, self.reason, self._body, self._location = status, "said", body, location

    def getheader(self, name):
        return self._location

    def read(self, count):
        chunk, self._body = self._body[:count], self._body[count:]
        return chunk


@pytest.fixture
def web(monkeypatch):
    """The answers of (host, path); what is asked is noted with the address that is connected to."""
    asked, answers = [], {}

    def look_up(host, port, type):
        if host not in HOSTS:
            raise socket.gaierror("unknown")
        return [(0, 0, 0, "", (address, port)) for address in HOSTS[host]]

    class Connection:
        def __init__(self, host, address):
            self.host, self.address = host, address

        def request(self, method, path, headers):
            asked.append((method, self.host, self.address, path))
            self.path = path

        def getresponse(self):
            return answers[self.host, self.path]

        def close(self):
            pass

    monkeypatch.setattr(fetching.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetching, "_Pinned", Connection)
    return SimpleNamespace(asked=asked, answers=answers)


def test_a_picture_is_fetched_from_the_address_that_was_checked_and_a_slow_answer_ends(web, monkeypatch):
    web.answers["a.org", "/x.png?s=1"] = Answer(302, location="/y.png")
    web.answers["a.org", "/y.png"] = Answer(body=b"P" * 200_000)
    assert fetched("https://a.org/x.png?s=1", 200_000, "row 1") == b"P" * 200_000
    assert web.asked == [("GET", "a.org", "93.184.216.34", path) for path in ("/x.png?s=1", "/y.png")]
    web.answers["a.org", "/slow"] = Answer(body=b"P" * 200_000)
    monkeypatch.setattr(fetching, "MOST_SECONDS", -1.0)
    with pytest.raises(BadConversation, match="took more than"):
        fetched("https://a.org/slow", 10**6, "row 1")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://a.org/x.png", "expected an https:// URL on a public host"),
        ("https://a.org:8080/x.png", "expected an https:// URL"),
        ("https://me:pass@a.org/x.png", "expected an https:// URL"),
        ("ftp://a.org/x", "expected an https:// URL"),
        ("https://a.org/a b", "percent-encoded"),
        ("https://[::1", "expected an address, got"),
        ("https://nowhere/x", "the host 'nowhere' was not found"),
        *((f"https://{host}/x", f"the host '{host}' has the address {HOSTS[host][-1]}, which is not public")
          for host in HOSTS if host != "a.org"),
    ],
)  # fmt: skip
def test_nothing_else_is_asked(url, sentence, web):
    with pytest.raises(BadConversation, match="row 1: ") as refused:
        fetched(url, 100, "row 1")
    assert sentence in str(refused.value) and web.asked == []


def test_a_redirect_inside_a_large_answer_and_a_missing_one_are_refused(web):
    web.answers["a.org", "/in"] = Answer(301, location="https://inside/x")
    web.answers["a.org", "/plain"] = Answer(307, location="http://a.org/x")
    web.answers["a.org", "/large"] = Answer(body=b"P" * 101)
    web.answers["a.org", "/gone"] = Answer(404)
    web.answers["a.org", "/round"] = Answer(302, location="/round")
    for path, sentence in (
        ("in", "the host 'inside' has the address 10.0.0.7"), ("plain", "expected an https:// URL"),
        ("large", "at most 100 bytes"), ("gone", "the answer is 404 said"), ("round", "at most 3 redirects"),
    ):  # fmt: skip
        with pytest.raises(BadConversation, match=sentence):
            fetched(f"https://a.org/{path}", 100, "row 1")
    assert not any(host == "inside" for _, host, _, _ in web.asked)


def test_rows_are_read_from_addresses_only_where_that_is_allowed(web, tmp_path):
    web.answers["a.org", "/x.png"] = Answer()
    with pytest.raises(BadConversation, match="URLs are fetched only with --allow_image_urls"):
        image_bytes("https://a.org/x.png", tmp_path, "row 1")
    assert web.asked == []
    assert image_bytes("https://a.org/x.png", tmp_path, "row 1", allow_urls=True) == b"PICTURE"
    web.answers["a.org", "/x.png"] = Answer()
    assert image_bytes({"path": "https://a.org/x.png"}, None, "row 1", allow_urls=True) == b"PICTURE"
    asked = list(web.asked)
    assert image_bytes("data:image/png;base64,AAAA", tmp_path, "row 1") == b"\0\0\0" and web.asked == asked
    with pytest.raises(BadConversation, match="expected an https:// URL"):
        image_bytes("file:///etc/passwd", tmp_path, "row 1", allow_urls=True)


def png(colour):
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(stream, "PNG")
    return stream.getvalue()


# Parts as services have them, whose other keys are no paths.
SERVICES = [
    {"type": "image_url", "image_url": {"url": "Data:image/png;base64,AA", "detail": "auto"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
    {"type": "image", "base64": "AA"},
]


def test_paths_bytes_and_pil(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("red.png").write_bytes(png("red"))
    part = {"type": "image", "image": Image.new("RGB", (3, 2), "red")}
    rows = [
        {"prompt": "red.png", "images": [png("red"), "red.png", tmp_path / "red.png"]},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "red.png"}]}]},
        {"image": {"bytes": png("blue"), "path": None}, "prompt": "a"},
        {"images": ["https://example.org/a.png"], "prompt": "a"},
        {"messages": [{"role": "user", "content": SERVICES}]},
    ]
    (address,) = address_of_rows(rows, tmp_path / "given")
    first, second, third, fourth, fifth = map(json.loads, open(address.removeprefix("jsonl:")))
    assert first["prompt"] == "red.png" and len(set(first["images"])) == 1
    folder = tmp_path / "given"
    assert image_bytes(first["images"][0], folder, "here") == png("red")
    typed, text = second["messages"][0]["content"]
    assert typed["type"] == "image" and text == {"type": "text", "text": "red.png"}
    written = Image.open(io.BytesIO(image_bytes(typed["image"], folder, "here")))
    assert written.getpixel((0, 0)) == (255, 0, 0)
    assert image_bytes(third["image"], folder, "here") == png("blue")
    assert fifth == rows[4]
    assert fourth["images"] == ["https://example.org/a.png"]
    assert address_of_rows(rows, folder, resumes=True) == [address]


def test_a_path_without_a_file_and_bytes_elsewhere_are_no_pictures(tmp_path):
    with pytest.raises(ThreestepError, match=r"^rows\[0\]\['images'\] expects an image .* got 'no.png', which"):
        address_of_rows([{"prompt": "a", "images": ["no.png"]}], tmp_path)
    with pytest.raises(ThreestepError, match=r"^rows\[0\]\['blob'\] expects text, numbers, lists or dicts, got bytes"):
        address_of_rows([{"prompt": "a", "blob": png("red")}], tmp_path)
