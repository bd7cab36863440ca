"""What reading pictures costs in every forward, and with the features of the frozen tower kept.

    python -m benchmarks.kept_features --data_dir GSM8K [--shape 5m] [--qwen] [--step3] [--rounds 5]
        [--folder runs/benchmarks]

The model and pictures of `pictured`, float32, one thread: four pictures of 256 tokens, each with 64 tokens of text of
which 32 are learnt; decoding, image processor, layout, forward and backward, in turns; processor seconds, medians. The
tower is frozen; the projector trains. With --step3 as of a rollout of step 3, whose pictures are new: prompts are read,
then the old policy and a reference, then two updates.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from benchmarks.pictured import make_pictured
from benchmarks.workload import SHAPES, Workload, config_of, make_workload
from threestep.plugins.images.data.reader import PixelReader, open_image_reader
from threestep.plugins.images.kept_features import KeptFeatures
from threestep.plugins.images.models.kept_features import open_feature_reader
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.pixels import ImagePixels
from threestep.plugins.images.prompts import PixelsOf
from training.utils.contracts.documents import MediaSpan, TokenSequence, join, plain
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.models.document_attention import use_document_attention
from training.utils.models.token_model import PolicyModel

PICTURES, IMAGE, TEXT, LEARNT = 4, 256, 64, 32
SIDES = (16, 16)  # of a picture's tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="GSM8K's files as published")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="5m")
    parser.add_argument("--qwen", action="store_true", help="a Qwen2-VL with a tower as deep as its language model")
    parser.add_argument("--step3", action="store_true", help="what a rollout with new pictures reads and learns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="runs/benchmarks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    workload = make_workload(Path(given.folder), given.shape, Path(given.data_dir))
    model, pixels_of = (_qwen if given.qwen else _llava)(workload, given.shape)
    use_document_attention(model)
    of_tower = [weight for name, weight in model.named_parameters() if _is_of_tower(name)]
    for weight in of_tower:
        weight.requires_grad_(False)
    reason = open_feature_reader(model, pixels_of([0]))
    assert reason is None, reason
    reference = copy.deepcopy(model).requires_grad_(False)
    reason = open_feature_reader(reference, pixels_of([0]), shares=model)
    assert reason is None, reason
    policies = [PolicyModel(part) for part in (model, reference)]
    kept = KeptFeatures(2**30)
    rows = _rows(model.config.image_token_id, SIDES if given.qwen else None)
    seconds: dict[str, list[float]] = {"pixels": [], "kept": []}
    for _ in range(given.rounds + 1):
        for form, taken in seconds.items():
            if given.step3:
                kept = KeptFeatures(2**30)
            images = RowImages(pixels_of, (), kept if form == "kept" else None)
            start = time.process_time()
            if given.step3:
                _rollout(*policies, images, rows)
            else:
                _learn(policies[0], images, rows)
            taken.append(time.process_time() - start)
    medians = {form: statistics.median(found[1:]) for form, found in seconds.items()}  # the first round warms up
    weights = sum(weight.numel() for weight in of_tower)
    print(f"{given.shape}: {model.num_parameters():,} weights, of which {weights:,} of the tower")
    told = ", ".join(f"{form} {median:.3f} s" for form, median in medians.items())
    print(f"{told}; {kept.bytes / PICTURES:,.0f} bytes a picture")
    print(f"pixels / kept: {medians['pixels'] / medians['kept']:.2f}")


def _is_of_tower(name: str) -> bool:
    return "vision_tower" in name or ("visual" in name and "merger" not in name)


def _llava(workload: Workload, shape: str) -> tuple[Any, PixelsOf]:
    pictured = make_pictured(workload, shape)
    model = AutoModelForImageTextToText.from_pretrained(pictured.model, dtype=torch.float32).eval()
    reader = open_image_reader(str(pictured.model), model.config, AutoTokenizer.from_pretrained(pictured.model))
    assert reader is not None
    encoded = [(pictured.rows / "pictures" / f"{key}.jpg").read_bytes() for key in range(PICTURES)]
    return model, PixelReader(reader, encoded)


def _qwen(workload: Workload, shape: str) -> tuple[Any, PixelsOf]:
    """A Qwen2-VL whose tower is as wide and as deep as its language model; pixels are drawn, not decoded."""
    text = config_of(shape)
    head = text.hidden_size // text.num_attention_heads // 2
    named = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = Qwen2VLConfig(
        text_config={
            **{name: getattr(text, name) for name in named},
            "num_key_value_heads": text.num_attention_heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [head - 2 * (head // 3), head // 3, head // 3],
            },
        },
        vision_config={
            "depth": text.num_hidden_layers,
            "embed_dim": text.hidden_size,
            "num_heads": text.num_attention_heads,
            "hidden_size": text.hidden_size,
        },
        image_token_id=4,
        video_token_id=3,
    )
    grids_I3 = torch.tensor([[1, 2 * SIDES[0], 2 * SIDES[1]]])

    def pixels_of(keys: Sequence[int]) -> ImagePixels:
        return ImagePixels(torch.randn(4 * IMAGE * len(keys), 3 * 2 * 14 * 14), grids_I3.repeat(len(keys), 1))

    return Qwen2VLForConditionalGeneration(config).eval(), pixels_of


def _rows(image_id: int, sides: tuple[int, int] | None) -> TokenRows:
    documents = []
    for key in range(PICTURES):
        text = torch.randint(5, 5000, (TEXT,), generator=torch.Generator().manual_seed(key))
        ids = join(torch.full((IMAGE,), image_id), text).input_ids
        is_target = torch.arange(len(ids)) >= len(ids) - LEARNT
        documents.append(plain(TokenSequence(ids, is_target, (MediaSpan(0, IMAGE, sides, key),))))
    return packed_rows([documents], 0)


def _learn(policy: PolicyModel, images: RowImages, rows: TokenRows) -> None:
    policy.zero_grad()
    policy(images.loaded(rows)).logprobs_M.mean().backward()


def _rollout(policy: PolicyModel, reference: PolicyModel, images: RowImages, rows: TokenRows) -> None:
    with torch.no_grad():
        policy(images.loaded(rows.without_targets()))  # the prompts; what is drawn has no pictures
        read = images.loaded(rows)
        policy(read), reference(read)
    for _ in range(2):
        _learn(policy, images, rows)


if __name__ == "__main__":
    main()
