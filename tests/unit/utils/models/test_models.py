"""One model: its flags, the class that loads it, its attention, the ranks that share its rows, where it stops, and its
scaled rotary positions, whose angles are those of the papers' formulas."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.chat_templates import chat_tokenizer
from tests.support.mistakes import mistakes_of
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.flags.added import NO_FLAGS
from training.utils.loading.models import load_causal_lm
from training.utils.loading.tokenizers import add_tokens
from training.utils.models.arguments import ModelArguments
from training.utils.models.attention_choice import planned_attention
from training.utils.models.families import (
    language_model_class,
)
from training.utils.models.own_forward import own_forward_of
from training.utils.models.rope_scaling import (
    RopeScaling,
    read_scaling,
    scaled,
    scaled_positions,
    steady_positions,
)
from training.utils.models.row_sharing import ALONE, RowSharing, row_sharing
from training.utils.models.settings import ModelSettings
from training.utils.models.stop_tokens import (
    joined_stop_tokens,
    set_stop_tokens,
    stop_tokens,
    stop_tokens_in,
    unused_stop_tokens,
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"model_name_or_path": ""}, ["--model_name_or_path is not set; set it to a model's folder or hub name"]),
        ({"dropout": -0.1}, ["--dropout expects 0 or more and less than 1, got -0.1"]),
        ({"attn_implementation": "flex"}, ["--attn_implementation expects one of auto, sdpa"]),
        ({"head_chunk_mb": -1, "dropout": 2.0}, ["--dropout expects", "--head_chunk_mb expects"]),
        ({"rope_scaling": "yarn"}, ["--rope_scaling expects a type"]),
    ],
)
def test_mistakes(given, words):
    found = mistakes_of(ModelArguments(**{"model_name_or_path": "m", **given}))
    assert len(found) == len(words)
    assert all(told.startswith(start) for told, start in zip(sorted(found), words, strict=True))


def test_every_setting_is_passed_on():
    given = {
        "attn_implementation": "flex_attention", "dropout": 0.1, "gradient_checkpointing": True,
        "trust_remote_code": True, "head_chunk_mb": 64, "freeze_vision_tower": False,
        "freeze_projector": True, "rope_scaling": "yarn:4",
    }  # fmt: skip
    settings = ModelArguments(model_name_or_path="m", **given).settings()
    others = {"name_or_path": "m", "trains_adapter_on": False, "takes_media": False, "new_head": False}
    assert vars(settings) == {**others, "preparers": settings.preparers, **given}
    assert ModelArguments(model_name_or_path="m").settings() == ModelSettings("m")


@pytest.mark.parametrize(
    "config, with_media, auto_class",
    [
        (LlamaConfig(), False, AutoModelForCausalLM),
        (Qwen2VLConfig(), False, AutoModelForImageTextToText),  # there is no other
        (Qwen2VLConfig(), True, AutoModelForImageTextToText),
        (Gemma3Config(), False, AutoModelForCausalLM),
        (Gemma3Config(), True, AutoModelForImageTextToText),
    ],
)
def test_the_class_that_loads_a_model(config, with_media, auto_class):
    assert language_model_class(config, with_media) is auto_class


def shared_by_two(flags: object) -> RowSharing:
    return RowSharing(2, flag="--ranks_of_a_row")


def test_a_plugin_says_which_ranks_share_rows(monkeypatch):
    tables: dict[str, str] = {}
    monkeypatch.setattr("training.utils.models.row_sharing.added", lambda table, known: tables)
    assert row_sharing(NO_FLAGS) is ALONE
    tables["ranks_of_a_row"] = f"{__name__}:shared_by_two"
    assert row_sharing(NO_FLAGS).size == 2
    tables["slices"] = f"{__name__}:shared_by_two"
    with pytest.raises(
        ThreestepError, match="share rows in only one way, but --ranks_of_a_row and --ranks_of_a_row each"
    ):
        row_sharing(NO_FLAGS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("wanted", ["auto", "sdpa"])
def test_on_a_cpu_it_is_runs_in_turn(save_folder, wanted):
    model = load_causal_lm(ModelSettings(save_folder(), attn_implementation=wanted), torch.float32, 1)
    assert model.config._attn_implementation == "sdpa_by_document" and own_forward_of(model).notes == []
    assert planned_attention(tiny_causal_lm("llama").to("meta"), wanted, False, None) == "sdpa"  # by a dry run


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()  # its eos is <|endoftext|>


@pytest.mark.parametrize(
    "own, trained, inside, expected",
    [
        (None, ["<|im_end|>"], [], ["<|im_end|>", "<|endoftext|>"]),
        (None, ["<|endoftext|>"], [], ["<|endoftext|>"]),
        ("<|eot_id|>", ["<|im_end|>", "</s>"], [], ["<|im_end|>", "</s>", "<|eot_id|>", "<|endoftext|>"]),
        ("<|eot_id|>", ["<|im_end|>", "</s>"], ["</s>", "<|eot_id|>"], ["<|im_end|>", "<|endoftext|>"]),
        (None, ["<|im_end|>"], ["<|im_end|>", "<|endoftext|>"], ["<|im_end|>"]),
    ],
)
def test_a_model_stops_where_its_training_did(tokenizer, tmp_path, own, trained, inside, expected):
    ids = tokenizer.convert_tokens_to_ids
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = own and ids(own)
    set_stop_tokens(model, tokenizer, ids(trained), set(ids(inside)))
    model.generation_config.save_pretrained(tmp_path)
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert stop_tokens(model) == ids(expected)
    assert not model.generation_config._from_model_config


def test_an_ordinary_piece_of_text_is_not_taken_over_and_named(tokenizer):
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer))
    letter, beyond = tokenizer("a")["input_ids"][0], len(tokenizer) + 3
    model.generation_config.eos_token_id = [letter, beyond, tokenizer.eos_token_id]
    said = unused_stop_tokens(stop_tokens(model), tokenizer)
    named = rf"lists the end tokens {letter} \('a'\), {beyond} \(no token of the tokenizer\), which"
    assert re.search(named, said) and "responses do not end there" in said
    set_stop_tokens(model, tokenizer, [tokenizer.eos_token_id])
    assert stop_tokens(model) == [tokenizer.eos_token_id]
    assert unused_stop_tokens(stop_tokens(model), tokenizer) is None


def test_an_added_token_and_a_control_token_of_the_plain_vocabulary_end_too():
    """As the `</tool_call>` of public tokenizers, which is not special; as `<reserved_106>` of Baichuan: a piece
    of the model's vocabulary, not added to it."""
    tokenizer, model = chat_tokenizer(), tiny_causal_lm("llama", vocab_size=200)
    add_tokens(tokenizer, ["</answer>"])
    (own,) = tokenizer("</answer>", add_special_tokens=False)["input_ids"]
    model.generation_config.eos_token_id = [own]
    assert unused_stop_tokens([own], tokenizer) is None
    set_stop_tokens(model, tokenizer, [tokenizer.eos_token_id])
    assert stop_tokens(model) == [tokenizer.eos_token_id, own]
    words = {"a": 0, "b": 1, "<reserved_106>": 2, "<eos>": 3, "<": 4}
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="<eos>")
    assert joined_stop_tokens([2, 1, 4], plain, [3]) == [3, 2]
    assert "1 ('b'), 4 ('<')" in unused_stop_tokens([2, 1, 4, 3], plain)


@pytest.mark.parametrize("given", [float("nan"), "2", [2, [3]], -1, True, {"a": 1}, 1.0])
def test_what_is_no_token(given):
    with pytest.raises(
        ThreestepError,
        match=r"'START': eos_token_id in generation_config.json .* must be a token ID or .*, got",
    ):
        stop_tokens_in(GenerationConfig(eos_token_id=given), "START")


def tiny(**changes: Any) -> LlamaConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128, **changes}
    return LlamaConfig(**shape)


def frequencies(config: Any) -> torch.Tensor:
    return LlamaRotaryEmbedding(config).inv_freq.double()


def test_linear_divides_every_position():
    """Position 8 has the angles that 4 had."""
    config = scaled(tiny(), "linear:2", "a model")
    assert config.max_position_embeddings == 256 and scaled(tiny(), None, "a model").max_position_embeddings == 128
    torch.testing.assert_close(frequencies(config), frequencies(tiny()) / 2)


def test_yarn_keeps_fast_angles_and_divides_slow_ones():
    """Peng et al., equations 17 and 23: of wavelengths above 128 positions (one rotation) a quarter of the frequency,
    of those below 4 (32 rotations) all of it; states are scaled by 0.1 ln 4 + 1."""
    own = tiny()
    config = scaled(own, "yarn:4", "a model")
    assert own.rope_parameters["rope_type"] == "default" and own.max_position_embeddings == 128  # it stays
    before, after = frequencies(tiny()), frequencies(config)
    wavelengths = 2 * math.pi / before
    ratio = after / before
    assert float(ratio[0]) == pytest.approx(1.0) and float(ratio[-1]) == pytest.approx(0.25)
    assert torch.all(ratio.diff() <= 1e-12) and int((wavelengths > 128).sum()) > 1
    assert LlamaRotaryEmbedding(config).attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.max_position_embeddings == 512


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
PUBLISHED = {  # rope_type: parameters, max_position_embeddings, positions, steady positions
    "default": ({"rope_type": "default"}, 128, 128, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 512, 512, None),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 128, 128, None),  # its angles change beyond them
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512, None),
    "yarn, as Qwen2.5 tells": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 128, 512, None
    ),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 64}, 512, 512, None),
    "longrope": ({**LONG, "original_max_position_embeddings": 32}, 512, 512, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_positions_of_every_type(name: str):
    """The types of transformers, as published models have them."""
    assert {rope["rope_type"] for rope, *_ in PUBLISHED.values()} == {"default", *ROPE_INIT_FUNCTIONS} - {
        "proportional"
    }
    rope, given, positions, steady = PUBLISHED[name]
    config = tiny(max_position_embeddings=given, rope_parameters={"rope_theta": 1e4, **rope})
    assert (scaled_positions(config), steady_positions(config)) == (positions, steady)
    if name != "default":
        with pytest.raises(ThreestepError, match=rf"already scaled \({rope['rope_type']}, \d+ of them\)"):
            scaled(config, "yarn:2", "a model")


def test_a_type_that_moves_is_one_whose_angles_change_beyond_steady_positions():
    rope = {"rope_theta": 1e4, **LONG, "original_max_position_embeddings": 32}
    made = LlamaRotaryEmbedding(tiny(max_position_embeddings=512, rope_parameters=rope))
    states = torch.zeros(1, 1, 32)

    def angles(tokens: int) -> torch.Tensor:
        """Of the first ten positions, in a batch whose longest sequence has so many tokens."""
        return made(states, torch.arange(tokens)[None])[0][:, :10].clone()

    assert torch.equal(angles(12), angles(32)) and not torch.equal(angles(33), angles(32))


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:1", "yarn:nan", "dynamic:2", "4", "linear:inf"])
def test_texts_that_are_no_scaling(text: str):
    assert read_scaling("linear:1.5") == RopeScaling("linear", 1.5)
    with pytest.raises(ThreestepError, match="--rope_scaling expects a type.*such as yarn:4, got"):
        read_scaling(text)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_positions_that_are_not_rotary_or_of_two_kinds(family: str):
    with pytest.raises(ThreestepError, match=rf"'a model' \({family}\) has none or several"):
        scaled(AutoConfig.for_model(family), "yarn:2", "a model")
