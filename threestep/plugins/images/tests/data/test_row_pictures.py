"""Rows with images: read as people store them, expanded as the family's processor does, kept once, never cut."""

from __future__ import annotations

import base64
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.image_readers import FAMILIES, picture, reader_of, tokenizer_of
from tests.support.pair_rows import all_rows
from threestep.plugins.images.data import reader as reading
from threestep.plugins.images.data.decoding import decoded
from threestep.plugins.images.tests.data.test_placeholders import assistant, text, user
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.cache import cache
from training.utils.data.rows.documents import responses_document, sentence_document
from training.utils.data.rows.media_store import MediaWriter

RED, WIDE, BLUE = picture(), picture(84, 28), picture(28, 56, (0, 0, 250))


@pytest.fixture(scope="module")
def readers():
    """Of each family: a tokenizer and a reader."""
    made = {}
    for family in FAMILIES:
        tokenizer = tokenizer_of(family)
        made[family] = (tokenizer, reader_of(family, tokenizer))
    return made


@pytest.fixture
def pictures(tmp_path):
    """The folder of the rows, with some pictures in it."""
    (tmp_path / "pics").mkdir()
    for name, data in (("red", RED), ("wide", WIDE), ("blue", BLUE)):
        (tmp_path / "pics" / f"{name}.png").write_bytes(data)
    return tmp_path


@pytest.fixture
def built(flags, readers, pictures):
    """built(rows, family, phase, **flags): the phase's data, all rows in it."""

    def build(rows, family="qwen2_vl", phase=1, **given):
        tokenizer, reader = readers[family]
        split = ",".join("1" if number == phase else "0" for number in (1, 2, 3))
        settings = {"data_split": split, "eval_fraction": 0.0, "prompt_style": "chat_template", **given}
        return build_phase(phase, flags(rows, **settings), tokenizer, seed=1, media=reader)

    return build


PART = {"type": "image"}
PATHS = ["pics/red.png", "pics/blue.png"]
TURNS = [user("Look: <image> and <image>?"), assistant("Two."), user("And?"), assistant("No more.")]


def own_processor(family, processor, tokenizer, image_id):
    """The family's of transformers."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    if family == "gemma3":
        tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
        tokenizer.image_token, tokenizer.image_token_id = "<image_soft_token>", image_id
        tokenizer.boi_token_id = tokenizer.convert_tokens_to_ids("<start_of_image>")
        return Gemma3Processor(processor, tokenizer, image_seq_length=4)
    if family == "llava":
        return LlavaProcessor(processor, tokenizer, 14, "default", num_additional_image_tokens=1)
    if family == "llava_next":
        return LlavaNextProcessor(processor, tokenizer, 4, "default", num_additional_image_tokens=1)
    if family == "idefics3":
        return Idefics3Processor(processor, tokenizer, image_seq_len=4)
    # The others are made with a processor of videos, which wants torchvision.
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
    from transformers.processing_utils import ProcessorMixin

    kind = SmolVLMProcessor if family == "smolvlm" else LlavaOnevisionProcessor

    class Pictures(kind):
        def __init__(self, image_processor, tokenizer):
            ProcessorMixin.__init__(self, image_processor, tokenizer)

        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

    made, image = Pictures(processor, tokenizer), {"image_token": "<image>", "image_token_id": image_id}
    if family == "smolvlm":
        image |= {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
        image |= {"image_seq_len": 4, "video_token": "<video>"}
    else:
        image |= {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "video_token": "<video>"}
        image |= {"vision_aspect_ratio": "anyres_max_2"}
    for name, value in image.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_the_familys_own_processor_makes_of_its_conversation(family, readers, built):
    tokenizer, reader = readers[family]
    first, paths = user([text("Look: "), PART, text(" and "), PART, text("?")]), PATHS
    if reader.family.one_picture:
        first, paths = user([text("Look: "), text(" and "), PART, text("?")]), PATHS[1:]
    told = "Look: <image> and <image>?" if len(paths) == 2 else "Look:  and <image>?"
    data = built([{"messages": [user(told), *TURNS[1:]], "images": paths}], family)
    (row,) = data.train
    messages = [first] + [{**turn, "content": [text(turn["content"])]} for turn in TURNS[1:]]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    pil = [decoded(data, "here") for data in (RED, BLUE)[-len(paths) :]]
    processor = reader._processor
    if family == "qwen2_vl":  # whose own wants torchvision
        for sides in [image.sides for image in row.media]:
            written = written.replace("<|image_pad|>", "<|X|>" * (sides[0] * sides[1]), 1)
        ids = tokenizer(written.replace("<|X|>", "<|image_pad|>"))["input_ids"]
        own = processor(images=pil, return_tensors="pt")
    elif family == "internvl":  # too
        own = processor(images=pil, crop_to_patches=True, return_tensors="pt")
        before, between, after = written.split("<IMG_CONTEXT>")
        first, second = (f"<img>{'<IMG_CONTEXT>' * (4 * tiles)}</img>" for tiles in own["num_patches"].tolist())
        ids = tokenizer(before + first + between + second + after)["input_ids"]
    else:
        # Some processors change the tokenizer.
        made = own_processor(family, processor, tokenizer_of(family), reader.family.placeholder_id)
        own = made(images=[pil], text=[written], return_tensors="pt")
        ids = own["input_ids"][0].tolist()
        if "pixel_attention_mask" in own:
            assert own["pixel_attention_mask"].all()  # so that it may be left out
    assert row.input_ids.tolist() == ids
    pixels = data.seen([image.key for image in row.media])
    if pixels.cuts_I3 is not None:
        own["pixel_values"] = torch.cat([a[:b] for a, b in zip(own["pixel_values"], pixels.counts, strict=True)])
        assert torch.equal(pixels.cuts_I3[:, 1:], own["image_sizes"])
    assert torch.equal(pixels.values, own["pixel_values"].reshape(pixels.values.shape).float())
    grids = own.get("image_grid_thw")
    assert (pixels.grids_I3 is None) == (grids is None) and (grids is None or torch.equal(pixels.grids_I3, grids))
    places = np.concatenate([np.arange(image.begin, image.end) for image in row.media])
    assert np.array_equal(np.flatnonzero(row.input_ids == reader.family.placeholder_id), places)
    assert not row.loss_mask[places].any() and row.loss_mask.any()
    assert all(image.sees_itself == (family == "gemma3") for image in row.media)
    assert sentence_document(row).segments[0].tokens.media == row.media


def test_a_family_that_reads_several_pictures_in_another_way_takes_one_a_row(built):
    rows = [
        {"messages": TURNS, "images": PATHS},
        {"messages": [user("Look: <image>"), *TURNS[1:]], "images": PATHS[:1]},
    ]
    with pytest.raises(
        ThreestepError, match="row 0: expected at most one image, got 2: llava_onevision handles rows with"
    ):
        built(rows, "llava_onevision")
    kept = built(rows, "llava_onevision", bad_conversations="drop")
    assert kept.report.train.dropped == {"bad_conversation": 1} and len(kept.train) == 1


def test_the_start_compares_with_the_familys_own_processor(readers):
    for family, (tokenizer, reader) in readers.items():
        assert "checked against" in reader.sentence and family.split("_")[0][:5] in reader.sentence.lower()
        assert reader.text_of(RED, "here").tokens > 0
        wrong, other = reader_of(family, tokenizer), replace(reader.text_of(RED, "here"), text="<image>")
        wrong.family = replace(wrong.family, read=lambda features, other=other: other)
        with pytest.raises(ThreestepError, match="56 x 28 pixels, the model's config.json implies .* tokens, but"):
            wrong.text_of(RED, "here")


FORMS = {
    "verl's parquet": (
        {"prompt": [user("<image>What?")], "images": [{"bytes": RED, "path": None}], "data_source": "d"}, 3
    ),
    "TRL's parts and a list": (
        {"messages": [user([PART, text("What?")]), assistant([text("Red.")])], "images": [RED]}, 1
    ),
    "TRL's plain prompt": ({"prompt": "What?", "completion": "Red.", "image": {"bytes": RED, "path": "x.png"}}, 1),
    "TRL's plain pair": ({"prompt": "What?", "chosen": "Red.", "rejected": "Blue.", "images": [RED]}, 2),
    "TRL's prompt and completion": (
        {"prompt": [user("What?")], "completion": [assistant("Red.")], "images": ["pics/red.png"]}, 1
    ),
    "LLaMA-Factory's messages": (
        {"messages": [user("<image>What?"), assistant("Red.")], "images": ["pics/red.png"]}, 1
    ),
    "LLaMA-Factory's ShareGPT": (
        {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}],
         "images": ["pics/red.png"]}, 1
    ),
    "LLaVA's one path": (
        {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Red."}],
         "image": "pics/red.png"}, 1
    ),
    "parts that hold their image": (
        {"messages": [user([{"type": "image", "image": {"bytes": RED}}, text("What?")]), assistant([text("Red.")])]}, 1
    ),
    "a path in OpenAI's part": (
        {"messages": [user([{"type": "image_url", "image_url": {"url": "pics/red.png"}}, text("What?")]),
                      assistant([text("Red.")])]}, 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_that_people_store(name, built, pictures, readers):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row, phase = FORMS[name]
    pq.write_table(pa.Table.from_pylist([row]), pictures / "rows.parquet")
    data = built(None, phase=phase, data_path=[f"parquet:{pictures}/rows.parquet"])
    (made,) = data.train
    tokenizer = readers["qwen2_vl"][0]
    ids = {1: "input_ids", 2: "prompt_ids"}.get(phase)
    ids = getattr(made, ids) if ids else made.flipped_prompt_ids[::-1]
    start = "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>What?<|im_end|>\n"
    assert tokenizer.decode(ids).startswith(start)
    (image,) = made.media
    begin = len(tokenizer("user\n")["input_ids"]) + 2
    assert (image.begin, image.tokens, image.sides, image.key) == (begin, 2, (1, 2), 0)
    assert data.train.stored_media[0] == RED and len(data.train.stored_media) == 1
    if phase == 2:
        prompt, *_ = responses_document(made, are_targets=True).segments
        assert prompt.tokens.media == made.media


def test_pictures_are_kept_once_and_decoded_only_when_asked_for(built, monkeypatch, readers):
    rows = [{"messages": TURNS, "images": [f"pics/{name}.png", "pics/red.png"]} for name in ("red", "wide") * 300]
    given = {"eval_fraction": 0.1, "num_workers": 2}
    first = built(rows, **given)
    assert len(first.train.stored_media) == 2 and sorted(first.train.stored_media) == sorted([RED, WIDE])
    assert {len(row.media) for row in all_rows(first)} == {2} and len(first.eval) == 60
    monkeypatch.setattr(reading, "decoded", None)  # whoever decodes now fails
    found = built(rows, **given)
    assert found.report.from_cache and len(found.train) == 540
    for row in all_rows(found):
        wide = [found.train.stored_media[image.key] == WIDE for image in row.media]
        assert [image.tokens for image in row.media] == [3 if is_wide else 2 for is_wide in wide] and not wide[1]
    monkeypatch.undo()
    keys = [image.key for image in found.train[0].media]
    assert found.seen(keys).grids_I3.tolist() == [[1, 2, 2 * image.tokens] for image in found.train[0].media]
    tokenizer, _ = readers["qwen2_vl"]
    other = reader_of("qwen2_vl", tokenizer, image_mean=[0.1, 0.1, 0.1])
    assert other.parts() != readers["qwen2_vl"][1].parts()


def test_a_damaged_file_of_pictures_is_built_anew(built):
    rows = [{"messages": TURNS, "images": PATHS}]
    store = built(rows).train.stored_media
    data = bytearray(open(store.path, "rb").read())
    data[len(data) // 2] ^= 1
    open(store.path, "wb").write(data)
    again = built(rows)
    assert not again.report.from_cache and sorted(again.train.stored_media) == sorted([RED, BLUE])


def test_a_damaged_picture_of_a_large_file_is_named_when_it_is_read(built, monkeypatch):
    monkeypatch.setattr(cache, "MEDIA_CHECKED_BYTES", 10)
    rows = [{"messages": TURNS, "images": PATHS}]
    path = built(rows).train.stored_media.path
    data = open(path, "rb").read()
    assert data.count(RED) == 1
    place = data.index(RED) + len(RED) // 2
    open(path, "wb").write(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    again = built(rows)
    assert again.report.from_cache
    store = again.train.stored_media
    read = []
    for key in range(2):
        try:
            read.append(store[key])
        except ThreestepError as problem:
            assert re.search("pictures.*: image [01] has changed since .* with --rebuild_cache", str(problem))
    assert read == [BLUE]


def test_shards_of_a_stopped_build_keep_their_pictures(built, monkeypatch):
    rows = [{"messages": TURNS, "images": PATHS if i % 2 else PATHS[::-1]} for i in range(520)]
    join = MediaWriter.finish

    def full(self):
        if "/shards/" not in self._path:
            raise OSError(28, "No space left on device", self._path)
        return join(self)

    monkeypatch.setattr(MediaWriter, "finish", full)
    with pytest.raises(ThreestepError, match="is full"):
        built(rows, num_workers=1)
    monkeypatch.undo()
    monkeypatch.setattr(reading, "decoded", None)
    data = built(rows, num_workers=1)
    assert len(data.train) == 520 and sorted(data.train.stored_media) == sorted([RED, BLUE])
    colors = [[data.train.stored_media[image.key] for image in row.media] for row in data.train]
    assert sorted(map(tuple, colors)) == sorted([(RED, BLUE), (BLUE, RED)] * 260)


@pytest.mark.parametrize(
    ("phase", "given", "whole_tokens"),
    [
        (1, {"truncation": "right", "max_seq_len": 36}, 60),
        (1, {"truncation": "left", "max_seq_len": 31}, 60),
        (2, {"truncation": "left", "max_seq_len": 31}, 60),
        (3, {"prompt_truncation": "left", "max_prompt_seq_len": 19}, 50),
        (3, {"prompt_truncation": "middle", "max_prompt_seq_len": 24}, 50),
    ],
)
def test_a_row_whose_cut_would_take_some_of_an_image_is_dropped_and_counted(
    phase, given, whole_tokens, built, pictures
):
    (pictures / "pics" / "large.png").write_bytes(picture(112, 56))  # 8 tokens, and 2 around them
    answers = {"chosen": [assistant("Yes, it is.")], "rejected": [assistant("No.")]}
    prompt = [user("Hi"), assistant("Ho"), user("<image>x")]
    rows = [{"prompt": prompt, "images": ["pics/large.png"], **answers}]
    rows += [{"prompt": [*prompt[:2], user("x")], "images": [], **answers}]
    assert [len(row.media) for row in built(rows, phase=phase).train] == [1, 0]
    cut = built(rows, phase=phase, **given)
    assert cut.report.train.dropped == {"cut_at_an_image": 1} and cut.report.train.truncated == 1
    assert [len(row.media) for row in cut.train] == [0]
    # The tokens of an image count: the text row alone fits.
    how, most = given
    dropped = built(rows, phase=phase, **{how: "drop", most: whole_tokens}).report.train.dropped
    assert dropped == {"prompt_too_long" if phase == 3 else "too_long": 1}


def test_a_cut_behind_the_images_and_the_loss_leave_them_whole(built):
    rows = [{"messages": [user("<image>What?"), assistant("Red, " * 30)], "images": PATHS[:1]}]
    data = built(rows, truncation="right", max_seq_len=60)
    (row,) = data.train
    assert row.length_tokens == 60 and row.media[0].tokens == 2 and data.report.train.truncated == 1
    (row,) = built([{"messages": TURNS, "images": PATHS}], loss_on="conversation").train
    inside = [place for image in row.media for place in range(image.begin, image.end)]
    assert sorted(np.flatnonzero(~row.loss_mask)) == [0, *inside]
    rows = [{"messages": TURNS, "images": PATHS}, {"messages": [user("Hi"), assistant("Ho")], "images": []}]
    assert [len(row.media) for row in built(rows).train] == [2, 0]


REFUSED = {
    "more places than images": (
        {"messages": TURNS, "images": PATHS[:1]}, "expected an image for each place, got 1 images"
    ),
    "the model's token in a text": (
        {"messages": [user("<|image_pad|> What?"), assistant("Red.")]}, "message 1: the text contains <|image_pad|>"
    ),
    "the model's token in an answer": (
        {"messages": [user("<image>"), assistant("<|image_pad|>")], "images": PATHS[:1]}, "message 2: the text contains"
    ),
    "a shape that Qwen refuses": (
        {"messages": [user("<image>"), assistant("Thin.")], "images": ["pics/thin.png"]},
        "image 1: an image of 1 x 300 pixels cannot be prepared for the model: absolute aspect ratio must be smaller",
    ),
    "a file that breaks off": (
        {"messages": [user("<image>"), assistant("Red.")], "images": ["pics/broken.png"]}, "image 1: the image cannot"
    ),
    "a video": ({"messages": [user("<image>"), assistant("Red.")], "videos": ["a.mp4"]}, "'videos' holds video"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_an_error_with_its_row_or_dropped_and_counted(name, built, pictures):
    row, sentence = REFUSED[name]
    (pictures / "pics" / "thin.png").write_bytes(picture(1, 300))
    (pictures / "pics" / "broken.png").write_bytes(picture(40, 40)[:-30])
    good = {"messages": TURNS, "images": PATHS}
    with pytest.raises(ThreestepError) as refused:
        built([good, row])
    assert sentence in str(refused.value) and ("line 2" in str(refused.value) or "row 1" in str(refused.value))
    kept = built([good, row], bad_conversations="drop")
    assert kept.report.train.dropped == {"bad_conversation": 1} and len(kept.train) == 1


def test_images_want_a_chat_template_and_a_model_that_reads_them(built, flags, readers, pictures):
    rows = [{"prompt": "What?", "chosen": " Red.", "images": PATHS[:1]}]
    with pytest.raises(ThreestepError, match="the row has images, which only a chat template can place; use"):
        built(rows, prompt_style="human_assistant")
    tokenizer, _ = readers["qwen2_vl"]
    data = flags(rows, prompt_style="chat_template", data_split="1,0,0", eval_fraction=0.0)
    with pytest.raises(ThreestepError, match="column 'images' holds images, but only text is trained on"):
        build_phase(1, data, tokenizer, seed=1)
    mute = tokenizer_of("qwen2_vl")
    mute.chat_template = mute.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(
        ThreestepError, match=r"expected the chat template to render <\|image_pad\|> for each of 1 images"
    ):
        build_phase(1, data, mute, seed=1, media=readers["qwen2_vl"][1])


def test_a_literal_image_tag_is_text_without_images_but_for_a_model_whose_token_it_is(built):
    rows = [{"messages": [user("What is <image>?"), assistant("A tag.")]}]
    assert built(rows).train[0].media == ()
    with pytest.raises(ThreestepError, match="message 1: the text contains <image>, the token that stands for images"):
        built(rows, "llava")


def test_a_data_url_is_the_image_that_it_holds(built):
    address = "data:image/png;base64," + base64.b64encode(RED).decode()
    bare = base64.b64encode(RED).decode().rstrip("=")
    images = (address, f"DATA:image/png;charset=x;base64,{bare}")
    rows = [{"messages": [user("<image>"), assistant("Red.")], "images": [image]} for image in images]
    one, other = built(rows).train
    assert one.input_ids.tolist() == other.input_ids.tolist() and one.media[0].key == other.media[0].key


def test_the_same_prompt_about_two_pictures_has_two_uids_in_any_order_of_the_data(built):
    rows = [{"prompt": [user("<image>What?")], "images": [path]} for path in (*PATHS, PATHS[0])]
    rows += [{"prompt": [user("What?")], "images": []}]
    red, blue, again, none = (row.uid for row in built(rows, phase=3).train)
    assert red == again and len({red, blue, none}) == 3
    assert {row.uid for row in built(rows[::-1], phase=3).train} == {red, blue, none}
    assert all(not {"images", "image"} & row.columns.keys() for row in built(rows, phase=3).train)
