"""Pictures of rows in memory are files beside the rows, and the rows hold their paths."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from threestep.inputs import address_of_rows
from threestep.plugins.images.data.values import image_bytes
from training.utils.base.errors import ThreestepError

Image = pytest.importorskip("PIL.Image")


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


def test_a_path_without_a_file(tmp_path):
    with pytest.raises(ThreestepError, match=r"^rows\[0\]\['images'\] expects a picture: .* got 'no.png', which"):
        address_of_rows([{"prompt": "a", "images": ["no.png"]}], tmp_path)


def test_bytes_elsewhere_are_no_picture(tmp_path):
    with pytest.raises(ThreestepError, match=r"^rows\[0\]\['blob'\] expects text, numbers, lists or dicts, got bytes"):
        address_of_rows([{"prompt": "a", "blob": png("red")}], tmp_path)
