"""Families of different kinds, asked everything that the sweep of all families asks (`python -m tests.families`)."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.families.answers import REFUSED, RIGHT, WRONG, Answer, asked, compared
from tests.families.configs import OVERRIDES, OVERRIDES_OF_VISION, VARIANTS
from tests.support.forked_programs import run_python
from training.utils.base.errors import ThreestepError

# Family, and how its rows are: learned positions, with an offset, sines; an encoder as decoder; a sliding window and
# soft caps; latent attention with shared experts; Mamba; Mamba-2 beside attention and experts; a router that draws.
ASKED = {
    "gpt2": "shares",
    "opt": "shares",
    "ctrl": "shares",
    "bert+decoder": "shares",
    "gemma2": "padded, because",
    "deepseek_v2": "shares",
    "phimoe": "shares",
    "mamba": "padded, because",
    "granitemoehybrid": "padded, because",
    # Refused in one sentence: looks ahead, computes nothing from token ids alone, counts positions from the padding,
    # reads a row by its length, changes its weights in a forward.
    "bert": "refused, because",
    "gemma4_assistant": "refused, because",
    "camembert+decoder": "refused, because",
    "phi3+longrope": "refused, because",
    "rwkv": "refused, because",
}
# What tests/invariants and tests/unit/utils ask as well.
SKIPPED = ("save", "sft", "reward", "zero0.fp32", "zero0.bf16", "zero3.fp32")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One sweep over the families of this file."""
    kept = tmp_path_factory.mktemp("families") / "answers.json"
    words = ["-m", "tests.families", "--processes", "2", "--json", str(kept), "--skip", *SKIPPED, "--only", *ASKED]
    done = run_python(words, timeout_seconds=560)
    assert kept.is_file(), done.stderr[-2000:]
    return {result["family"]: result for result in json.loads(kept.read_text())}


@pytest.mark.parametrize("family", ASKED)
def test_a_family_is_as_plain_transformers_has_it(family, results):
    result = results[family]
    bad = [answer for answer in result["answers"] if answer["verdict"] not in (RIGHT, REFUSED)]
    assert not bad, bad
    assert result["verdict"].startswith(ASKED[family])
    if ASKED[family].startswith("refused"):
        return
    questions = {answer["question"].split(".")[0] for answer in result["answers"]}
    assert {"rows", "rollout", "lora", "ratio", "zero3"} <= questions


# Of models of images and text: how rows of texts are, and rows with images.
ASKED_OF_VISION = {
    "smolvlm": ("shares", "shares"),
    "llava_next": ("shares", "shares"),
    "mistral3": ("shares", "refused: models of the family mistral3 cannot be trained on images"),
    "paligemma": ("refused, because PaliGemmaForConditionalGeneration is not causal", "refused: models of the family"),
    "blip": ("refused, because BlipForConditionalGeneration cannot be used", "refused: models of the family"),
    "pi0": ("refused, because ", "refused: models of the family pi0"),
}


@pytest.fixture(scope="module")
def of_vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One sweep over the families above; in the long form over all."""
    kept = tmp_path_factory.mktemp("vision") / "answers.json"
    only = [] if request.config.getoption("--long") else ["--only", *ASKED_OF_VISION]
    done = run_python(["-m", "tests.families", "--vision", "--json", str(kept), *only], timeout_seconds=560)
    assert kept.is_file(), done.stderr[-2000:]
    return {result["family"]: result for result in json.loads(kept.read_text())}


@pytest.mark.parametrize("family", ASKED_OF_VISION)
def test_a_family_of_images_is_as_plain_transformers_has_it_or_refused_by_name(family, of_vision):
    result, (texts, images) = of_vision[family], ASKED_OF_VISION[family]
    assert result["verdict"].startswith(texts) and result["images"].startswith(images)
    bad = [answer for answer in result["answers"] if answer["verdict"] not in (RIGHT, REFUSED)]
    assert not bad, bad
    if images == "shares":
        asked = {answer["question"] for answer in result["answers"] if answer["question"].startswith("images.")}
        assert {"images.shared", "images.packed.others", "images.padded.others"} <= asked


@pytest.mark.long
def test_no_family_of_images_is_wrong(of_vision):
    wrong = [
        (name, answer["question"], answer["said"])
        for name, result in of_vision.items()
        for answer in result["answers"]
        if answer["verdict"] not in (RIGHT, REFUSED)
    ]
    assert len(of_vision) > 80 and not wrong


def test_a_crash_and_a_hang_are_results(tmp_path, monkeypatch, capsys):
    from tests.families import __main__ as program
    from tests.families import judge

    def judged(name, place, skipped):
        os.kill(os.getpid(), 9) if name == "crashes" else __import__("time").sleep(60)

    monkeypatch.setattr(judge, "judged", judged)
    crashed, hung = program.sweep(["crashes", "hangs"], 2, 1.0, tmp_path / "kept.json")
    assert crashed["verdict"].startswith("TRACEBACK its process ended with SIGKILL")
    assert hung["verdict"].startswith("TRACEBACK not done after 1 seconds")
    assert len(json.loads((tmp_path / "kept.json").read_text())) == 2
    assert "crashes" in capsys.readouterr().out


def test_differences_and_errors_become_answers():
    assert compared("q", 1e-9, 1e-6).verdict == RIGHT
    assert compared("q", 1e-3, 1e-6).verdict == WRONG
    assert compared("q", float("nan"), 1e-6).verdict == WRONG

    def refuses() -> list[Answer]:
        raise ThreestepError("no such model")

    def breaks() -> list[Answer]:
        raise KeyError("sliding")

    assert asked("q", refuses) == [Answer("q", REFUSED, None, "no such model")]
    [broken] = asked("q", breaks)
    assert broken.verdict == "traceback" and "KeyError: 'sliding' (test_families.py:" in broken.said


def test_every_override_is_of_a_family():
    from tests.families.__main__ import families, vision_families

    assert set(OVERRIDES) | set(VARIANTS) <= set(families())
    assert set(OVERRIDES_OF_VISION) <= set(vision_families())
