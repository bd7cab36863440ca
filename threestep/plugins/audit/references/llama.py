"""A Llama in float64: from its weights and token ids to logits or scores, and back to the gradient of its weights.

Written from the papers: Touvron et al. 2023 (LLaMA), section 2.2: pre-normalisation by RMSNorm (Zhang and Sennrich
2019, equation 4), SwiGLU (Shazeer 2020, equation 6), rotary embeddings (Su et al. 2021, equation 34); grouped queries
(Ainslie et al. 2023). The gradient is autograd's, so that torch is imported here, and nowhere else in this room.

S sequences, T their tokens with padding on the right, V vocabulary, H width, N heads, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

KNOWN = ("llama", "qwen2")  # the second has biases of queries, keys and values


@dataclass(frozen=True)
class Slopes:
    """The loss's derivative by what the model returns for each token or sequence.

    logprobs_T: by the log-probabilities. normalizers_T: by log Z. entropies_T: by the entropy of the distribution.
    scores_S: by a reward model's scores. values_T: by a critic's values. Those that are None are 0. temperature: that
    divides the logits.
    """

    logprobs_T: np.ndarray | None = None
    normalizers_T: np.ndarray | None = None
    entropies_T: np.ndarray | None = None
    scores_S: np.ndarray | None = None
    values_T: np.ndarray | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class Dropout:
    """place: `outputs` of attention and MLP, or weights of the `attention`."""

    place: str
    rate: float
    random: torch.Generator


class Llama:
    """weights: by parameter, LoRA's among them. config: as the model's folder has it. rounded: weights are read in
    bf16, as the forward reads them."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: Mapping[str, Any], rounded: bool = False) -> None:
        self.config = config
        self.weights = {name: torch.tensor(values, dtype=torch.float64) for name, values in weights.items()}
        self._read = {name: _bf16(value) if rounded else value for name, value in self.weights.items()}
        self._dropout: Dropout | None = None
        embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
        self._trunk = embedding.removesuffix("embed_tokens.weight")
        self._outer = self._trunk.removesuffix("model.")

    def check(self, ids_T: np.ndarray) -> None:
        """Read one token. Raises some exception where weights, configuration and token ids do not fit."""
        rows = len(self._weight(f"{self._trunk}embed_tokens.weight"))
        if int(self.config["vocab_size"]) != rows or not ((ids_T >= 0) & (ids_T < rows)).all():
            raise ValueError(f"vocab_size is {self.config['vocab_size']}, and the embedding has {rows:,} rows")
        if int(self.config["num_hidden_layers"]) < 1:
            raise ValueError(f"num_hidden_layers is {self.config['num_hidden_layers']}")
        first = np.zeros(1, dtype=np.int64)
        with torch.no_grad():
            if self._has(f"{self._outer}score.weight"):
                self._score(first)
            else:
                self._predicting(first)

    # --- what the model returns

    def logits(self, sequences: list[np.ndarray], places: list[np.ndarray] | None = None) -> np.ndarray:
        """Return [T, V], the logits that predict each token; of a first token 0. places: of the tokens, for the rotary
        embeddings; default: 0, 1, ..."""
        found = []
        with torch.no_grad():
            for number, ids in enumerate(sequences):
                found.append(self._predicting(ids, None if places is None else places[number]).numpy())
        return np.concatenate(found)

    def scores(self, sequences: list[np.ndarray]) -> np.ndarray:
        """Return [S], of each sequence's last token."""
        with torch.no_grad():
            return np.array([float(self._score(ids)) for ids in sequences])

    def dropped_logits(self, sequences: list[np.ndarray], dropout: Dropout) -> np.ndarray:
        """Return [T, V], as `logits`, of one forward in which numbers are dropped."""
        self._dropout = dropout
        found = self.logits(sequences)
        self._dropout = None
        return found

    def values(self, sequences: list[np.ndarray]) -> np.ndarray:
        """Return [T], a critic's value at the place before each token; of a first token 0."""
        with torch.no_grad():
            return np.concatenate([self._values(ids, None).numpy() for ids in sequences])

    def gradients(
        self, sequences: list[np.ndarray], slopes: Slopes, places: list[np.ndarray] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the loss's gradient by each weight, and the sum over sequences of its sizes: what a backward in less
        precision rounds by, where sequences cancel each other."""
        leaves = {name: value.detach().requires_grad_(True) for name, value in self._read.items()}
        self._read, kept = leaves, self._read
        sums, sizes = ({name: torch.zeros_like(value) for name, value in kept.items()} for _ in range(2))
        begin = 0
        for place, ids in enumerate(sequences):
            own = slice(begin, begin + len(ids))
            begin += len(ids)
            part = self._loss_part(ids, slopes, own, place, place_T=None if places is None else places[place])
            if part is None:
                continue
            found = torch.autograd.grad(part, [*leaves.values()], allow_unused=True)
            for name, value in zip(leaves, found, strict=True):
                if value is not None:
                    sums[name] += value
                    sizes[name] += value.abs()
        self._read = kept
        return tuple({name: value.numpy() for name, value in part.items()} for part in (sums, sizes))  # type: ignore[return-value]

    def _loss_part(
        self, ids: np.ndarray, slopes: Slopes, own: slice, place: int, *, place_T: np.ndarray | None
    ) -> torch.Tensor | None:
        """The move of the loss along its slopes, of one sequence."""
        if slopes.scores_S is not None:
            return float(slopes.scores_S[place]) * self._score(ids)
        if slopes.values_T is not None:
            return (torch.tensor(slopes.values_T[own]) * self._values(ids, place_T)).sum()
        given = {name: getattr(slopes, f"{name}_T") for name in ("logprobs", "normalizers", "entropies")}
        parts = {name: torch.tensor(values[own]) for name, values in given.items() if values is not None}
        if not any(bool(part.any()) for part in parts.values()):
            return None
        scaled_TV = self._predicting(ids, place_T) / slopes.temperature
        normalizer_T = scaled_TV.logsumexp(-1)
        read_T = scaled_TV.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1) - normalizer_T
        probability_TV = scaled_TV.softmax(-1)
        entropy_T = normalizer_T - (probability_TV * scaled_TV).sum(-1)
        values = {"logprobs": read_T, "normalizers": normalizer_T, "entropies": entropy_T}
        return sum(((part * values[name]).sum() for name, part in parts.items()), torch.zeros((), dtype=torch.float64))

    # --- the model

    def _predicting(self, ids: np.ndarray, place_T: np.ndarray | None = None) -> torch.Tensor:
        """Return [T, V], row t from the tokens before t."""
        name = f"{self._outer}lm_head.weight"
        head_VH = self._weight(name) if self._has(name) else self._weight(f"{self._trunk}embed_tokens.weight")
        return functional.pad((self._states(ids, place_T) @ head_VH.T)[:-1], (0, 0, 1, 0))

    def _score(self, ids: np.ndarray) -> torch.Tensor:
        return (self._states(ids)[-1] @ self._weight(f"{self._outer}score.weight").T).squeeze()

    def _values(self, ids: np.ndarray, place_T: np.ndarray | None) -> torch.Tensor:
        found_T = (self._states(ids, place_T) @ self._weight(f"{self._outer}score.weight").T).squeeze(-1)
        return functional.pad(found_T[:-1], (1, 0))

    def _states(self, ids: np.ndarray, place_T: np.ndarray | None = None) -> torch.Tensor:
        """Return [T, H], after the last norm."""
        own_T = torch.tensor(np.arange(len(ids)) if place_T is None else place_T, dtype=torch.float64)
        # transformers gives the pad token's embedding no gradient, also where the token is part of a text.
        table_VH, pad = self._weight(f"{self._trunk}embed_tokens.weight"), self.config.get("pad_token_id")
        state_TH = functional.embedding(torch.tensor(ids), table_VH, padding_idx=pad)
        for layer in range(int(self.config["num_hidden_layers"])):
            own = f"{self._trunk}layers.{layer}."
            mixed_TH = self._attention(self._norm(state_TH, f"{own}input_layernorm"), f"{own}self_attn.", own_T)
            state_TH = state_TH + self._dropped(mixed_TH, "outputs")
            normed_TH = self._norm(state_TH, f"{own}post_attention_layernorm")
            gate = functional.silu(self._linear(normed_TH, f"{own}mlp.gate_proj"))
            passed_TH = self._linear(gate * self._linear(normed_TH, f"{own}mlp.up_proj"), f"{own}mlp.down_proj")
            state_TH = state_TH + self._dropped(passed_TH, "outputs")
        return self._norm(state_TH, f"{self._trunk}norm")

    def _attention(self, state_TH: torch.Tensor, own: str, place_T: torch.Tensor) -> torch.Tensor:
        heads = int(self.config["num_attention_heads"])
        shared = int(self.config.get("num_key_value_heads") or heads)

        def split(name: str, count: int) -> torch.Tensor:
            return self._linear(state_TH, f"{own}{name}").unflatten(-1, (count, -1)).transpose(0, 1)  # [N, T, D]

        query, key, value = (
            split(f"{name}_proj", count) for name, count in (("q", heads), ("k", shared), ("v", shared))
        )
        query, key = self._turned(query, place_T), self._turned(key, place_T)
        key, value = (part.repeat_interleave(heads // shared, dim=0) for part in (key, value))
        weight_NTT = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        later_TT = torch.ones(weight_NTT.shape[1:], dtype=torch.bool).triu(1)
        mixed = self._dropped(weight_NTT.masked_fill(later_TT, -math.inf).softmax(-1), "attention") @ value
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{own}o_proj")

    def _dropped(self, values: torch.Tensor, place: str) -> torch.Tensor:
        """Srivastava et al. 2014, scaled by 1 / (1 - rate)."""
        own = self._dropout
        if own is None or own.place != place:
            return values
        kept = torch.rand(values.shape, generator=own.random, dtype=torch.float64) >= own.rate
        return values * kept / (1.0 - own.rate)

    def _turned(self, heads_NTD: torch.Tensor, place_T: torch.Tensor) -> torch.Tensor:
        """Turn each pair (i, i + D/2) by position / theta^(2 i / D)."""
        half = heads_NTD.shape[-1] // 2
        rope = self.config.get("rope_parameters") or {}
        theta = float(rope.get("rope_theta") or self.config.get("rope_theta") or 10_000.0)
        rate_D = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle_TD = place_T.unsqueeze(1) * rate_D
        first, second = heads_NTD[..., :half], heads_NTD[..., half:]
        cos, sin = angle_TD.cos(), angle_TD.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _norm(self, state_TH: torch.Tensor, name: str) -> torch.Tensor:
        size_T1 = state_TH.square().mean(-1, keepdim=True) + float(self.config["rms_norm_eps"])
        return state_TH / size_T1.sqrt() * self._weight(f"{name}.weight")

    def _linear(self, state_TH: torch.Tensor, name: str) -> torch.Tensor:
        """A linear layer, with LoRA's addition (Hu et al. 2021, equation 3) where it has one."""
        base = f"{name}.base_layer" if self._has(f"{name}.base_layer.weight") else name
        found = state_TH @ self._weight(f"{base}.weight").T
        if self._has(f"{base}.bias"):
            found = found + self._weight(f"{base}.bias")
        down, up = (f"{name}.lora_{side}.default.weight" for side in "AB")
        if not self._has(down):
            return found
        return found + float(self.config["lora_scale"]) * (state_TH @ self._weight(down).T @ self._weight(up).T)

    def _weight(self, name: str) -> torch.Tensor:
        return self._read[name]

    def _has(self, name: str) -> bool:
        return name in self._read


def _bf16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float64)


def why_unknown(config: Mapping[str, Any]) -> str:
    """Say what of the model this reference lacks; "" if nothing."""
    if config.get("model_type") not in KNOWN:
        return f"a reference for {config.get('model_type') or 'the model'}: only {', '.join(KNOWN)} have one"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        return f"a reference for rotary embeddings of the type {rope['rope_type']}"
    if config.get("hidden_act", "silu") != "silu":
        return f"a reference for the activation {config['hidden_act']}"
    if config.get("use_sliding_window") or (config.get("model_type") != "qwen2" and config.get("sliding_window")):
        return "a reference for sliding windows"
    return ""
