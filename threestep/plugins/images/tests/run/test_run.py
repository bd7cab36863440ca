"""What a run does with images: examples, flags beside them, pictures for a reward and of samples."""

from __future__ import annotations

import hashlib
import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig, Mistral3Config

from tests.support.data_flags import data_flags
from tests.support.image_readers import picture, reader_of, tokenizer_of, write_folder
from tests.support.ppo_flags import ppo_flags
from tests.support.vision_models import answers, awake, llava, sequence
from threestep.plugins.images.data.reader import PixelReader
from threestep.plugins.images.models import kept_features
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.pixels import ImagePixels
from threestep.plugins.images.run import sample_pictures
from threestep.plugins.images.run.reward_pictures import pictures_of
from threestep.plugins.images.run.row_images import check_beside_images, row_images, with_kept_features
from threestep.plugins.images.run.sample_pictures import SamplePictures
from threestep.plugins.samples.samples import SampleTexts
from training.step3_ppo.flags.checks import check_beside_media, checked_components
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import MediaSpan, shared_prompt, unshared
from training.utils.contracts.rows import PromptRow, SentenceRow
from training.utils.data.build.build import build_phase
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.data.rows.documents import sentence_document
from training.utils.data.rows.media_store import HeldMedia
from training.utils.models.own_forward import read_own_forward
from training.utils.models.token_model import PolicyModel
from training.utils.run.run_folder import RunFolder
from training.utils.setup.media import reader_of_folder, reader_of_model, why_unread


def test_why_the_images_of_rows_are_not_read(tmp_path):
    Mistral3Config().save_pretrained(tmp_path / "unknown")
    LlamaConfig().save_pretrained(tmp_path / "text")
    bare = write_folder(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    assert why_unread(str(tmp_path / "text")) == ONLY_TEXT == why_unread(str(tmp_path))
    unknown = why_unread(str(tmp_path / "unknown"))
    assert unknown.startswith(
        "models of the family mistral3 cannot be trained on images here, only those of gemma3, idefics3,"
    )
    assert unknown.endswith("smolvlm; train a model of one of these families, or train on text alone")
    assert why_unread(str(bare)).startswith(f"'{bare}' (qwen2_vl) has no image processor settings; to train")
    assert reader_of_model(str(tmp_path / "unknown"), False, tokenizer_of("qwen2_vl")) is None


@pytest.mark.parametrize("form", ["column", "part", "video"])
def test_a_row_says_it(form, tmp_path):
    Mistral3Config().save_pretrained(tmp_path / "unknown")
    answer = {"role": "assistant", "content": "Red."}
    turns = [{"role": "user", "content": "Which?"}, answer]
    row = {"messages": turns, "images": ["a.png"]}
    if form == "part":
        row = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}, answer]}
    if form == "video":
        row = {"messages": turns, "videos": ["a.mp4"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = {"prompt_style": "chat_template", "data_split": "1,0,0", "eval_fraction": 0.0}
    data = data_flags(data_path=[f"jsonl:{tmp_path / 'rows.jsonl'}"], data_output_path=str(tmp_path / "cache"), **asked)
    unread = "models of the family mistral3 cannot be trained on images here, only those of gemma3"
    said = ONLY_TEXT if form == "video" else unread
    with pytest.raises(ThreestepError, match=f"line 1.*, but {said}"):
        build_phase(1, data, tokenizer_of("qwen2_vl"), seed=1, unread=why_unread(str(tmp_path / "unknown")))


def test_a_folder_in_place_of_a_configuration_is_no_tokenizer_alone(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert reader_of_folder(str(tmp_path), None) is None
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ThreestepError, match="holds no config.json"):
        reader_of_folder(str(tmp_path), None)


def row(length, *keys):
    mask = np.zeros(length, dtype=bool)
    mask[-1] = True
    images = tuple(MediaSpan(at, 1, key=key) for at, key in enumerate(keys))
    return SentenceRow(0, np.arange(length, dtype=np.int32), mask, media=images)


def lengths(rows):
    images = row_images(rows, lambda keys: None, sentence_document)
    return [document.tokens for document in images.examples]


def test_examples_are_the_shortest_rows_with_different_images():
    assert lengths([row(3), row(9, 1), row(8, 2), row(7, 1), row(4)]) == [7, 8]
    assert lengths([row(9, 1), row(7, 1, 2), row(8, 1)]) == [7, 8]
    assert lengths([row(5, 1), row(3)]) == [5]
    assert row_images([row(3), row(4)], lambda keys: None, sentence_document) is None

    def rows():
        for length in range(100, 60, -1):
            assert length > 68
            yield row(length, length)

    assert lengths(rows()) == [69, 70]


def test_a_flag_that_does_not_go_with_images_is_refused():
    said = "^--neftune_alpha 5.0 does not work with rows that have images: noise .*; use 0$"
    with pytest.raises(ThreestepError, match=said):
        check_beside_images({"neftune_alpha": 5.0})
    check_beside_images({"neftune_alpha": 0.0})


@pytest.fixture(scope="module")
def measured():
    """A model whose tower is frozen, and the images of its rows, which it was measured by."""
    family = awake(llava())
    family.tower.requires_grad_(False)
    documents = [shared_prompt(sequence(family, 2, f"image {key}", 3), answers(family, 4)) for key in (0, 1)]
    images = RowImages(family.pixels, tuple(alone for document in documents for alone in unshared(document)))
    read_own_forward(family.model, media=images)
    return family.model, images


def kept(model, images, megabytes):
    engine = SimpleNamespace(eval=model.eval, ranks=SimpleNamespace(device=torch.device("cpu")))
    policy = PolicyModel(model)
    return with_kept_features(images, megabytes, model, engine, read=lambda rows: policy(rows).logprobs_M)


def test_features_are_kept_where_they_give_the_numbers_of_pixels(measured, monkeypatch):
    model, images = measured
    assert kept(model, images, 0) is images
    found = kept(model, images, 8)
    assert len(found.kept) == 2 and found.kept.most_bytes == 8 * 2**20
    model, images = measured
    features = kept_features.FeatureReader.features
    monkeypatch.setattr(kept_features.FeatureReader, "features", lambda self, pixels: -features(self, pixels))
    sentence = (
        "^--kept_image_features_mb 8 does not work with this Llava.*: with kept features, its results differ by .*"
    )
    with pytest.raises(ThreestepError, match=sentence + "; remove it$"):
        kept(model, images, 8)


def beside_images(**given) -> None:
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    flags = ppo_flags(**{**paths, "advantage": "grpo", "num_samples_per_prompt": 2, "reward": "gsm8k", **given})
    components = checked_components(flags)
    check_beside_media(flags, components, None)
    check_beside_media(flags, components, RowImages(lambda keys: ImagePixels(torch.zeros(1)), ()))


def test_what_reads_images_goes_with_them():
    beside_images()
    beside_images(advantage="gae", reward="model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support images, but some prompts"),
        ({"speculate": "2", "speculate_by": "ngram"},
         "--speculate 2 does not work with prompts that have images: it can guess"),
        ({"parallel_thinking": True},
         "--parallel_thinking does not work with prompts that have images: it can branch"),
        ({"mtp_num_layers": 1}, "--mtp_num_layers 1 does not work with prompts that have images: it uses token"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_images_is_named(given, said):
    with pytest.raises(ThreestepError, match=said):
        beside_images(**given)


def test_a_reward_sees_the_pictures_of_a_prompt():
    """One of two tiles, another, the first again; each is decoded when it is taken."""
    stored = {}
    for key, color in ((4, "red"), (9, "blue")):
        file = io.BytesIO()
        Image.new("RGBA", (3, 2), color).save(file, format="PNG")
        stored[key] = file.getvalue()
    spans = [MediaSpan(at, 1, key=key) for at, key in enumerate((4, 4, 9, 4, 4))]
    row = PromptRow(0, np.arange(5), "", None, media=tuple(spans), media_digests=("a", "b", "a"))
    reader: Any = None
    found = pictures_of(PixelReader(reader, stored), row)
    assert [(one.mode, one.size, one.getpixel((0, 0))) for one in found] == [
        ("RGB", (3, 2), color) for color in ((255, 0, 0), (0, 0, 255), (255, 0, 0))
    ]
    assert found.encoded[1] == stored[9] and found[0] is not found[0] and len(found[1:]) == 2
    assert len(pictures_of(PixelReader(reader, stored), PromptRow(0, np.arange(5), "", None))) == 0


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


def test_pictures_are_kept_small_by_the_main_rank_alone(tmp_path, pixels):
    samples = SampleTexts(keeper=SamplePictures(RunFolder(tmp_path, True), pixels).names)
    assert samples.media([span(0), span(1), span(0)]).names == [name_of(LARGE), name_of(SMALL), name_of(LARGE)]
    kept = files(tmp_path)
    sizes = {name: Image.open(io.BytesIO(data)).size for name, data in kept.items()}
    assert sizes == {f"{name_of(LARGE)}.png": (128, 64), f"{name_of(SMALL)}.png": (56, 28)}
    assert samples.media([]).names == [] == SampleTexts().media([span(0)]).names
    assert SamplePictures(RunFolder(tmp_path / "other", False), pixels).names([span(1)]) == [name_of(SMALL)]
    assert not (tmp_path / "other" / "sample_pictures").exists()


def test_a_run_that_goes_on_keeps_what_is_there_and_no_more_than_the_bound(tmp_path, pixels, monkeypatch):
    RunFolder(tmp_path, True).write_medium(f"{name_of(LARGE)}.png", b"as it was", "picture")
    monkeypatch.setattr(sample_pictures, "MOST_PICTURES", 1)
    assert SamplePictures(RunFolder(tmp_path, True), pixels).names([span(0), span(1)]) == [
        name_of(LARGE),
        name_of(SMALL),
    ]
    assert files(tmp_path) == {f"{name_of(LARGE)}.png": b"as it was"}
