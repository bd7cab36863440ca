"""The models and rows that the invariant tests and the programs they launch share. Made on the spot, always alike.

The shapes are chosen so that ZeRO-3 has something to shard (embeddings and MLPs are above DeepSpeed's persistence
threshold of 10,000 elements, attention and norms below it) and the weights are large enough for attention, positions
and a wrong mask to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    PreTrainedModel,
)

from training.utils.contracts.rows import MarkedRow, PromptRow, ResponsesRow, SentenceRow, TextBlock

VOCAB = 211
END, PAD = 0, 1
TAGS = (3, 4, 5, 6)  # that open a block and a path, and close them


@dataclass(frozen=True)
class StandInTokenizer:
    """All that these tests ask of a tokenizer: how many tokens it has, which one pads, and something readable."""

    pad_token_id: int = PAD

    def __len__(self) -> int:
        return VOCAB

    def decode(self, ids: torch.Tensor) -> str:
        return " ".join(str(int(index)) for index in ids)


def config(**changes: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        **changes,
    )


def save_models(folder: Path) -> None:
    """Write folder/causal (tied embeddings), folder/untied, folder/scalar, folder/actor, which ends its responses
    every few tokens, folder/thinker, which opens blocks besides, folder/absolute, a GPT-2, and one of every other
    family."""
    for name, seed, make in (
        ("causal", 0, lambda: LlamaForCausalLM(config(tie_word_embeddings=True))),
        ("untied", 1, lambda: LlamaForCausalLM(config(tie_word_embeddings=False))),
        ("scalar", 2, lambda: LlamaForSequenceClassification(config(num_labels=1))),
        ("actor", 3, _model_that_ends),
        ("thinker", 3, _model_that_thinks),
        ("absolute", 4, lambda: GPT2LMHeadModel(_gpt2())),
        *((name, 4, partial(_of_family, name)) for name in FAMILIES),
        ("mixture", 5, lambda: MixtralForCausalLM(mixture())),
        ("mixture_scalar", 6, lambda: MixtralForSequenceClassification(mixture(num_labels=1))),
        ("mixture_wide", 7, lambda: MixtralForCausalLM(mixture(num_local_experts=160, intermediate_size=8))),
    ):
        torch.manual_seed(seed)
        make().save_pretrained(folder / name)


def mixture(**changes: object) -> MixtralConfig:
    """Of its own coefficient, large enough to matter. With 160 experts a router's weight is large enough for ZeRO-3 to
    shard it."""
    common = {name: value for name, value in config().to_dict().items() if name in _OF_A_MIXTURE}
    own = {"num_local_experts": 6, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.7, "intermediate_size": 48}
    return MixtralConfig(**{**common, **own, **changes})


_OF_A_MIXTURE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def _gpt2() -> GPT2Config:
    """Absolute positions: where a Llama sees distances alone, a shift by padding shows here."""
    return GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=None,
        eos_token_id=END, pad_token_id=PAD, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


# Beside Llama: families that pack, and two (ALiBi, state space) that train padded whatever is asked.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 16},
    "gpt2": {"n_positions": 64, "n_inner": 192, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"ffn_dim": 192, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mamba": {"state_size": 4},
}
PADDED_FAMILIES = ("bloom", "mamba")


def _of_family(name: str) -> PreTrainedModel:
    common = config().to_dict()
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared += ("num_key_value_heads", "max_position_embeddings", "initializer_range")
    shared += ("bos_token_id", "eos_token_id", "pad_token_id")
    if name == "mamba":
        shared = tuple(key for key in shared if key != "intermediate_size")
    if name == "gpt2":
        shared = tuple(key for key in shared if key not in ("intermediate_size", "max_position_embeddings"))
    changes = {key: common[key] for key in shared if name in ("qwen3", "gemma3_text") or "key_value" not in key}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**changes, **FAMILIES[name]}))


def _model_that_ends() -> LlamaForCausalLM:
    """All embeddings share a direction, and the head reads that direction as the end token."""
    model = LlamaForCausalLM(config(tie_word_embeddings=False))
    direction = torch.nn.functional.normalize(torch.randn(64), dim=0)
    with torch.no_grad():
        model.model.embed_tokens.weight += 4.0 * direction
        model.lm_head.weight[END] = 1.3 * direction
    return model


def _model_that_thinks() -> LlamaForCausalLM:
    """The same, and reads it as the tags that open a block and open and close a path."""
    model = _model_that_ends()
    with torch.no_grad():
        model.lm_head.weight[[*TAGS[:3]]] += model.lm_head.weight[END]
    return model


def _ids(random: np.random.Generator, least: int, most: int) -> np.ndarray:
    return random.integers(2, VOCAB, random.integers(least, most + 1)).astype(np.int32)


def sentences(count: int, seed: int, most_tokens: int = 20) -> list[SentenceRow]:
    """Prompts of 1 to 8 tokens and responses of very different lengths, each ended by END."""
    random = np.random.default_rng(seed)
    rows = []
    for row_id in range(count):
        prompt, response = _ids(random, 1, 8), _ids(random, 0, most_tokens - 9)
        ids = np.concatenate([prompt, response, [END]]).astype(np.int32)
        rows.append(SentenceRow(row_id, ids, np.arange(len(ids)) >= len(prompt)))
    return rows


def conversations(count: int, seed: int) -> list[SentenceRow]:
    """Sentences of 7 to 19 tokens that go on from one of two conversations at one of three places, and train what is
    before it in half of the rows."""
    random = np.random.default_rng(seed)
    stems = [_ids(random, 12, 12) for _ in range(2)]
    rows = []
    for row_id in range(count):
        stem = stems[row_id % 2][: int(random.choice([6, 9, 12]))]
        ids = np.concatenate([stem, _ids(random, 0, 6), [END]]).astype(np.int32)
        first = int(random.choice([2, len(stem)]))
        rows.append(SentenceRow(row_id, ids, np.arange(len(ids)) >= first))
    return rows


def without_targets(row: SentenceRow) -> SentenceRow:
    return SentenceRow(row.row_id, row.input_ids, np.zeros_like(row.loss_mask))


def without_end(row: SentenceRow) -> SentenceRow:
    """The same row, whose end token carries no loss: what a mask made of `ids != pad` does where pad is eos."""
    return SentenceRow(row.row_id, row.input_ids, row.loss_mask & (row.input_ids != END))


def ranked(count: int, seed: int) -> list[ResponsesRow]:
    """Two responses a prompt, and three to every third prompt."""
    random = np.random.default_rng(seed)
    rows = []
    for row_id in range(count):
        responses = 3 if row_id % 3 == 2 else 2
        ended = tuple(np.append(_ids(random, 0, 9), END).astype(np.int32) for _ in range(responses))
        rows.append(ResponsesRow(row_id, _ids(random, 1, 6), ended))
    return rows


def marked(count: int, seed: int, first_id: int = 0) -> list[MarkedRow]:
    """A response a prompt, good but for every third; some prompts are equal."""
    random = np.random.default_rng(seed)
    rows = []
    for row_id in range(first_id, first_id + count):
        prompt = rows[-1].prompt_ids if row_id % 5 == 4 else _ids(random, 1, 6)
        response = np.append(_ids(random, 0, 9), END).astype(np.int32)
        rows.append(MarkedRow(row_id, prompt, (response,), is_good=row_id % 3 != 1))
    return rows


def ranked_conversations(count: int, seed: int) -> list[ResponsesRow]:
    """The same as prompts with two responses, three to every third prompt, some of which begin alike."""
    random = np.random.default_rng(seed)
    rows = []
    for row in conversations(count, seed):
        prompt, response = np.split(row.input_ids, [int(row.loss_mask.argmax())])
        others = [np.append(_ids(random, 1, 5), END), np.append(response[:-1], [9, END])]
        responses = [response, *others[: 2 if row.row_id % 3 == 2 else 1]]
        rows.append(ResponsesRow(row.row_id, prompt[:8], tuple(part[-10:].astype(np.int32) for part in responses)))
    return rows


def with_margins(rows: list[ResponsesRow]) -> list[ResponsesRow]:
    """Margins between neighbours of the ranking, and every fourth row without any."""
    random = np.random.default_rng(9)
    drawn = [random.uniform(0, 2, len(row.response_ids) - 1).astype(np.float32) for row in rows]
    return [
        row if row.row_id % 4 == 3 else replace(row, margins=margins) for row, margins in zip(rows, drawn, strict=True)
    ]


def prompts(count: int, seed: int) -> list[PromptRow]:
    random = np.random.default_rng(seed)
    return [PromptRow(row_id, _ids(random, 1, 9)[::-1].copy(), f"prompt {row_id}", None) for row_id in range(count)]


def text_blocks(count: int, seed: int, tokens: int = 12) -> list[TextBlock]:
    random = np.random.default_rng(seed)
    return [TextBlock(row_id, random.integers(0, VOCAB, tokens).astype(np.int32)) for row_id in range(count)]
