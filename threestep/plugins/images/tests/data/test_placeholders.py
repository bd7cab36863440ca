"""Places of images in conversations, in the forms of verl, LLaMA-Factory, TRL and OpenAI."""

from __future__ import annotations

import random

import pytest

from threestep.plugins.images.data.placeholders import place_images
from training.utils.base.errors import ThreestepError
from training.utils.data.formats.media import BadConversation
from training.utils.data.formats.messages import image_values

WHERE = "rows.jsonl, line 3"
IMAGE = {"type": "image"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text(content):
    return {"type": "text", "text": content}


HO = assistant("Ho")


@pytest.mark.parametrize(
    ("messages", "images", "contents"),
    [
        ([user("<image>Hi"), HO], ["a"], [[IMAGE, text("Hi")], "Ho"]),  # verl, LLaMA-Factory
        ([user("A <image>, <image>\n"), HO, user("And <image>?")], ["a", "b", "c"],
         [[text("A "), IMAGE, text(", "), IMAGE, text("\n")], "Ho", [text("And "), IMAGE, text("?")]]),
        ([user([IMAGE, text("Hi")]), HO], ["a"], [[IMAGE, text("Hi")], "Ho"]),  # TRL
        ([user([{"type": "image", "text": None}, {"type": "text", "text": "Hi", "image": None}])], ["a"],
         [[IMAGE, text("Hi")]]),  # as parquet fills structs up
        ([user([text("<image>Hi")])], ["a"], [[IMAGE, text("Hi")]]),
        ([user([IMAGE, text("a tag: <image>")])], ["a"], [[IMAGE, text("a tag: <image>")]]),
        ([{"role": "system", "content": "S"}, user("Hi"), HO], ["a", "b"],
         ["S", [IMAGE, IMAGE, text("Hi")], "Ho"]),  # TRL's plain text
        ([user("What does <image> mean?"), HO], [], ["What does <image> mean?", "Ho"]),
        ([user([text("a"), text("b")])], [], ["ab"]),
    ],
)  # fmt: skip
def test_places(messages, images, contents):
    placed = place_images(messages, images, WHERE)
    assert [message["content"] for message in placed.messages] == contents
    assert [message["role"] for message in placed.messages] == [message["role"] for message in messages]
    assert placed.images == images


@pytest.mark.parametrize("part", [{"type": "image", "image": "a"}, {"type": "image", "path": "a"},
                                  {"type": "image_url", "image_url": {"url": "a"}}])  # fmt: skip
def test_parts_may_hold_their_images(part):
    placed = place_images([user([part, text("Hi")]), HO], [], WHERE)
    assert placed.messages[0]["content"] == [IMAGE, text("Hi")] and placed.images == ["a"]


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "input_image", "image_url": "data:image/png;base64,AA"}, "data:image/png;base64,AA"),
        ({"type": "image", "base64": "AA", "url": None}, {"base64": "AA"}),
        ({"type": "image", "source": {"type": "base64", "data": "AA"}}, {"type": "base64", "data": "AA"}),
        ({"type": "image", "source": {"type": "url", "url": "a"}}, "a"),
    ],
)
def test_parts_of_services_hold_their_images(part, image):
    assert place_images([user([part, text("Hi")]), HO], [], WHERE).images == [image]


@pytest.mark.parametrize(
    ("messages", "images", "said"),
    [
        ([user("<image>")], ["a", "b"], "expected an image for each place, got 2 images and 1 places"),
        ([user("<image><image>")], ["a"], "got 1 images and 2 places"),
        ([user([{**IMAGE, "image": "a"}])], ["b"], "got 1 in parts, 0 parts without one and 1 in a column"),
        ([user([{**IMAGE, "image": "a", "path": "b"}])], [], "message 1: an image part: expected one image, got 2"),
        ([user([{"type": "input_image", "file_id": "f1"}])], [], "expected its image, got a file_id from an online"),
        ([HO], ["a"], "expected a user message for 1 images without a place, got none"),
        ([user("Hi"), assistant("<image>")], ["a"], "message 2: an image in an assistant message"),
        ([user([{"type": "video"}])], ["a"], "a content part: expected text or an image, got one of type 'video'"),
        ([user(["a"])], [], "a content part: expected text or an image, got text"),
        ([user([{"type": "text"}])], ["a"], "a content part: expected text, got null"),
        ([user(7)], ["a"], "message 1: 'content': expected text or typed parts, got a number"),
    ],
)
def test_what_is_refused(messages, images, said):
    with pytest.raises(BadConversation) as error:
        place_images(messages, images, WHERE)
    assert str(error.value).startswith(WHERE) and said in str(error.value) and "\n" not in str(error.value)


def test_mutated_rows_end_in_a_sentence_or_with_as_many_places_as_images():
    draw = random.Random(0)
    odd = [None, "", 7, True, [], {}, ["a"], b"a", "<image>", {"type": "image"}, [IMAGE], [{"type": "video"}], [[]]]
    ends = {"placed": 0, "sentence": 0}
    for _ in range(1000):
        content = draw.choice(["<image>Hi", "Hi", [dict(IMAGE), text("Hi")], [text("<image>")], "a<image><image>"])
        row = {"images": [b"a"] * draw.randrange(3), "messages": [user(content), dict(HO), user(content)]}
        message = draw.choice(row["messages"])
        change = draw.randrange(6)
        if change == 0:
            row["images"] = draw.choice(odd)
        elif change == 1:
            row["image"] = draw.choice(odd)
        elif change == 2:
            message["content"] = draw.choice(odd)
        elif change == 3 and isinstance(message["content"], list):
            part = dict(draw.choice(message["content"]))
            part[draw.choice(["type", "text", "image", "path", "image_url"])] = draw.choice(odd)
            message["content"] = [*message["content"], part]
        elif change == 4:
            row["messages"].pop(draw.randrange(3))
        try:
            placed = place_images(row["messages"], image_values(row, WHERE), WHERE)
        except ThreestepError as error:
            assert str(error).startswith(WHERE) and "\n" not in str(error)
            ends["sentence"] += 1
        else:
            contents = [message["content"] for message in placed.messages if isinstance(message["content"], list)]
            assert sum(part == IMAGE for content in contents for part in content) == len(placed.images)
            ends["placed"] += 1
    assert min(ends.values()) > 100, ends
