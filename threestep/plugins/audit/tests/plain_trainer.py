"""A plain PyTorch trainer of a tiny model: SFT, preferences of pairs, marked responses, a reward model, GRPO and PPO.
It writes the record of its last optimizer step as threestep/plugins/audit/README.md describes it, and shares no code
with Threestep or the judge.

Every part is a short method, which a fault replaces. Ranks are loops: each has its micro-batches and its gradients.

T tokens of a micro-batch, sequence after sequence, S sequences, Q pairs, V vocabulary, E width; R drawn tokens of a
rank, B responses.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from tests.support.plain_losses import Sums, marked_loss, pair_loss

VOCABULARY, WIDTH, HEADS, THETA = 40, 16, 2, 10000.0
PAD, BOS, EOS = 0, 1, 2
GROUP = 4  # responses to a prompt

CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "rms_norm_eps": 1e-6,
    "rope_theta": THETA, "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
OPTIMIZER = {
    "max_grad_norm": 0.5, "beta1": 0.8, "beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1,
    "schedule": "linear", "peak_learning_rate": 0.02, "warmup_steps": 3, "total_steps": 20,
}  # fmt: skip
_POLICY = {
    "reduction": "token mean", "temperature": 0.7, "kl_estimator": "k3", "kl_in": "loss", "kl_coef": 0.1,
    "clip_low": 0.1, "clip_high": 0.2,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"reduction": "token mean"},
    "dpo": {"preference_loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.1},
    "marked": {"preference_loss": "kto", "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
    "reward": {"margin_scale": 1.0, "label_smoothing": 0.0, "center_coef": 0.01},
    "grpo": {**_POLICY, "advantage": "grpo", "norm_by": "group", "std_ddof": 1, "std_epsilon": 1e-4},
    "ppo": {
        **_POLICY, "advantage": "gae", "gamma": 0.95, "lam": 0.8, "whiten": True, "kl_estimator": "k1",
        "kl_in": "reward", "clip_value": 0.01,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A run. step: the one that is recorded, after those before it. settings: that are not the objective's usual ones.
    uses: others that it trains by, and does not record. left: padding stands on the left. leaves_out: responses without
    an end carry no loss. keeps: what the record has, of the logits and of the model."""

    objective: str = "sft"
    ranks: int = 2
    micro_batches: int = 3
    packed: bool = True
    left: bool = False
    bf16: bool = False
    seed: int = 0
    step: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    uses: dict[str, Any] = field(default_factory=dict)
    leaves_out: bool = False
    keeps: str = "logits model"


@dataclass
class Text:
    """A prompt with a response. number: of the response in a rollout, else of the text in the step. asked: where a
    second question stands in it."""

    ids: list[int]
    prompt: int  # tokens
    number: int
    row: int
    ended: bool = True
    asked: range = range(0)

    @property
    def drawn(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def data(self) -> list[bool]:
        return [place >= self.prompt and place not in self.asked for place in range(len(self.ids))]


class Batch:
    """The texts of a micro-batch, with their padding if rows are padded."""

    def __init__(self, texts: list[Text], packed: bool, left: bool) -> None:
        self.texts, self.packed, self.left = texts, packed, left
        longest = max(len(text.ids) for text in texts)
        self.pads = [0 if packed else longest - len(text.ids) for text in texts]
        self.lengths = [len(text.ids) + pad for text, pad in zip(texts, self.pads, strict=True)]
        ids, real, data, first = [], [], [], []
        for text, pad in zip(texts, self.pads, strict=True):
            before, after = (pad, 0) if left else (0, pad)
            ids += [PAD] * before + text.ids + [PAD] * after
            real += [False] * before + [True] * len(text.ids) + [False] * after
            data += [False] * before + text.data + [False] * after
            first += [True] + [False] * (len(text.ids) + pad - 1)
        self.ids_T = torch.tensor(ids)
        self.is_real_T, self.data_T, self.first_T = torch.tensor(real), torch.tensor(data), torch.tensor(first)
        self.sequence_T = torch.arange(len(texts)).repeat_interleave(torch.tensor(self.lengths))

    def spread(self, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """[T], the values of each response's drawn tokens by its number, 0 elsewhere."""
        found_T = torch.zeros(len(self.ids_T))
        found_T[self.data_T] = torch.cat([values[text.number] for text in self.texts])
        return found_T

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(self.texts), dtype=values_T.dtype).index_add(0, self.sequence_T, values_T)

    def moved(self, values_T: torch.Tensor, by: int) -> torch.Tensor:
        """Each place has the value of the one `by` before it, of its own sequence; else 0."""
        stays_T = torch.roll(self.sequence_T, by) == self.sequence_T
        edge_T = torch.arange(len(values_T)) >= by if by > 0 else torch.arange(len(values_T)) < len(values_T) + by
        return torch.roll(values_T, by) * (stays_T & edge_T)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, position_NT: torch.Tensor, sees_NTT: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (part(x).view(split).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotated(query.float(), position_NT), rotated(key.float(), position_NT)
        weights = (query @ key.mT / split[-1] ** 0.5).masked_fill(~sees_NTT.unsqueeze(1), -1e9).softmax(-1)
        return self.o_proj((weights @ value.float()).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp, self.dropout = Attention(), Mlp(), nn.Dropout(0.1)

    def forward(self, h: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        h = h + self.dropout(self.self_attn(self.input_layernorm(h), *places))
        return h + self.dropout(self.mlp(self.post_attention_layernorm(h)))


class TinyModel(nn.Module):
    """A Llama of one layer by the names of its weights, its output tied to its input, and a head for one number."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList([Layer()])
        self.model.norm = Norm()
        self.score = nn.Linear(WIDTH, 1, bias=False)
        with torch.no_grad():
            self.embed.weight.mul_(0.4)
        self.eval()  # no dropout

    @property
    def embed(self) -> nn.Embedding:
        return self.model.embed_tokens

    def forward(self, ids_NT: torch.Tensor, position_NT: torch.Tensor, sees_NTT: torch.Tensor) -> torch.Tensor:
        return self.model.norm(self.model.layers[0](self.embed(ids_NT), position_NT, sees_NTT))


def rotated(x: torch.Tensor, position_NT: torch.Tensor) -> torch.Tensor:
    """Su et al. 2021; halves, as Llama has them. x: [N, heads, T, D]."""
    half = x.shape[-1] // 2
    angle = position_NT[:, None, :, None] * THETA ** (-torch.arange(half) / half)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


class PlainTrainer:
    """Takes `setup.step` optimizer steps and keeps the record of the last."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.setup, self.random = setup, np.random.default_rng(setup.seed)
        self.told = {**SETTINGS[setup.objective], **OPTIMIZER, **setup.settings}
        self.settings = {**self.told, **setup.uses}
        self.model, self.reference = TinyModel(), TinyModel()
        self.reference.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            for weight in self.reference.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        self.moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in self.model.named_parameters()}
        self.updates = 0
        self.figures: dict[str, float] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.tensors: list[dict[str, list[torch.Tensor]]] = []  # of each rank

    # ---- data

    def texts(self, count: int) -> list[Text]:
        """Made up. `count` texts with different prompts."""
        return [self.text(self.prompt(), number) for number in range(count)]

    def prompt(self) -> list[int]:
        return [BOS, *self.random.integers(3, VOCABULARY, int(self.random.integers(2, 7))).tolist()]

    def text(self, prompt: list[int], number: int) -> Text:
        ended = bool(self.random.random() > 0.3) or self.setup.objective not in ("grpo", "ppo")
        drawn = self.random.integers(3, VOCABULARY, int(self.random.integers(1, 8)))
        response = [*drawn.tolist(), EOS] if ended else drawn.tolist()
        row = int(self.random.integers(0, 10_000))
        if self.setup.objective != "sft":
            return Text([*prompt, *response], len(prompt), number, row, ended)
        asked, again = self.prompt()[1:], self.random.integers(3, VOCABULARY, 3).tolist()
        begin = len(prompt) + len(response)
        ids = [*prompt, *response, *asked, *again, EOS]
        return Text(ids, len(prompt), number, row, asked=range(begin, begin + len(asked)))

    def micro_batches(self) -> list[list[Batch]]:
        """Of each rank: uneven ones."""
        pairs = self.setup.objective in ("dpo", "reward")
        shares = [
            [int(n) for n in self.random.integers(1, 5, self.setup.micro_batches)] for _ in range(self.setup.ranks)
        ]
        total = sum(sum(share) for share in shares)
        if pairs:
            prompts = [self.prompt() for _ in range(total)]
            texts = [self.text(prompt, 2 * n + side) for n, prompt in enumerate(prompts) for side in (0, 1)]
            shares = [[2 * n for n in share] for share in shares]
        else:
            texts = self.texts(total)
        found, begin = [], 0
        for share in shares:
            found.append([])
            for size in share:
                found[-1].append(self.batch(texts[begin : begin + size]))
                begin += size
        return found

    def batch(self, texts: list[Text]) -> Batch:
        return Batch(texts, self.setup.packed, self.setup.left)

    # ---- forward

    def hidden(self, model: TinyModel, batch: Batch) -> torch.Tensor:
        """[T, E], the state that predicts each token: of the token before it; 0 for a sequence's first."""
        shape = (1, -1) if batch.packed else (len(batch.texts), -1)
        sequence_NT, real_NT = batch.sequence_T.view(shape), batch.is_real_T.view(shape)
        position_NT = self.positions(batch).view(shape)
        width = sequence_NT.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        same = self.same(sequence_NT)
        sees = causal & same & (real_NT.unsqueeze(1) | torch.eye(width, dtype=torch.bool))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.setup.bf16):
            hidden_TE = model(batch.ids_T.view(shape), position_NT, sees).reshape(len(batch.ids_T), WIDTH)
        before_TE = torch.cat([torch.zeros_like(hidden_TE[:1]), hidden_TE[:-1]])
        return before_TE.masked_fill(batch.first_T.unsqueeze(1), 0.0)

    def same(self, sequence_NT: torch.Tensor) -> torch.Tensor:
        """[N, T, T], whether a token may see another at all."""
        return sequence_NT.unsqueeze(2) == sequence_NT.unsqueeze(1)

    def positions(self, batch: Batch) -> torch.Tensor:
        """[T], from each sequence's first real token."""
        places = [torch.arange(length) for length in batch.lengths]
        shifts = [pad if batch.left else 0 for pad in batch.pads]
        return torch.cat([(place - shift).clamp(min=0) for place, shift in zip(places, shifts, strict=True)])

    def logits(self, model: TinyModel, batch: Batch) -> torch.Tensor:
        hidden_TE = self.hidden(model, batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.setup.bf16):
            return hidden_TE @ model.embed.weight.T

    def logprobs(self, logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        scaled_TV = logits_TV.float() / self.settings.get("temperature", 1.0)
        return scaled_TV.log_softmax(-1).gather(-1, ids_T.unsqueeze(-1)).squeeze(-1)

    def loss_mask(self, batch: Batch) -> torch.Tensor:
        return batch.data_T & ~batch.first_T

    def read(self, batch: Batch, mask_T: torch.Tensor | None = None) -> torch.Tensor:
        """[T], the model's log-probabilities where there is loss, or by another mask, recorded."""
        logits_TV, own_T = self.logits(self.model, batch), self.loss_mask(batch)
        logprobs_T = self.logprobs(logits_TV, batch.ids_T) * (own_T if mask_T is None else mask_T)
        self.keep(logprobs=logprobs_T, loss_mask=own_T)
        if "logits" in self.setup.keeps:
            self.keep(logits=logits_TV)
        return logprobs_T

    # ---- losses: this micro-batch's part of the step's

    def part(self, batch: Batch) -> torch.Tensor:
        """The part that is differentiated, recorded."""
        kinds = {"sft": self.sft, "dpo": self.dpo, "marked": self.marked, "reward": self.reward}
        loss = kinds[self.setup.objective](batch)
        self.keep(micro_losses=loss.reshape(1))
        self.add("loss", loss)
        return loss

    def sft(self, batch: Batch) -> torch.Tensor:
        losses_T = self.token_losses(self.read(batch))
        self.keep(token_losses=losses_T)
        return self.reduced(losses_T, self.loss_mask(batch), batch)

    def token_losses(self, logprobs_T: torch.Tensor) -> torch.Tensor:
        return -logprobs_T

    def reduced(self, values_T: torch.Tensor, mask_T: torch.Tensor, batch: Batch) -> torch.Tensor:
        """From tokens to a number, with the denominators of the whole step."""
        values_T = values_T * mask_T
        if self.settings["reduction"] == "token mean":
            return values_T.sum() / self.tokens
        return (batch.sums(values_T) / batch.sums(mask_T.float()).clamp(min=1)).sum() / self.sequences

    def sums_of(self, batch: Batch) -> Sums:
        """Of the responses, recorded."""
        sums_S = self.policy_sums(batch)
        with torch.no_grad():
            ref_S = self.reference_sums(batch)
        self.keep(logprob_sums=sums_S, ref_logprob_sums=ref_S)
        usual = {"label_smoothing": 0.0, "simpo_gamma": 0.0, "cpo_alpha": 0.0}
        return Sums(sums_S, sums_S, ref_S, batch.sums(self.loss_mask(batch).float()), {**usual, **self.settings})

    def policy_sums(self, batch: Batch) -> torch.Tensor:
        return batch.sums(self.read(batch))

    def reference_sums(self, batch: Batch) -> torch.Tensor:
        return batch.sums(self.logprobs(self.logits(self.reference, batch), batch.ids_T) * self.loss_mask(batch))

    def dpo(self, batch: Batch) -> torch.Tensor:
        return self.mean_of(self.dpo_losses(self.sums_of(batch)))

    def dpo_losses(self, own: Sums) -> torch.Tensor:
        return pair_loss("sum" if "preference_terms" in self.told else self.settings["preference_loss"], own)

    def marked(self, batch: Batch) -> torch.Tensor:
        own, good_S = self.sums_of(batch), self.good(batch)
        self.keep(is_good=good_S, mismatched_ratios=batch.mismatched_S)
        own.constants["point"] = self.point_of_loss()
        return self.mean_of(self.marked_losses(own, good_S))

    def marked_losses(self, own: Sums, good_S: torch.Tensor) -> torch.Tensor:
        return marked_loss(self.settings["preference_loss"], own, good_S)

    def good(self, batch: Batch) -> torch.Tensor:
        return torch.tensor([text.number % 3 > 0 for text in batch.texts])

    @torch.no_grad()
    def ratios(self, batch: Batch) -> torch.Tensor:
        logprobs_T = self.logprobs(self.logits(self.model, batch), batch.ids_T) * self.loss_mask(batch)
        return batch.sums(logprobs_T) - self.reference_sums(batch)

    def point(self, ranks: list[list[Batch]]) -> float:
        """What ratios are compared with: of the whole step."""
        flat = [batch for batches in ranks for batch in batches]
        if self.settings["preference_loss"] == "kto":
            return max(0.0, float(torch.cat([batch.mismatched_S for batch in flat]).mean()))
        ratios_S, good_S = (torch.cat([of(batch) for batch in flat]) for of in (self.ratios, self.good))
        sides = [ratios_S[own_S].mean() for own_S in (good_S, ~good_S) if own_S.any()]
        return float(sum(sides) / len(sides))

    def point_of_loss(self) -> float:
        return self.figures["reference_point"]

    def reward(self, batch: Batch) -> torch.Tensor:
        scores_S = self.scores(batch)
        margins_Q = torch.tensor([(text.row % 4) * 0.5 for text in batch.texts[0::2]])
        self.keep(scores=scores_S, margins=margins_Q)
        return self.mean_of(self.reward_losses(scores_S[0::2], scores_S[1::2], margins_Q))

    def scores(self, batch: Batch) -> torch.Tensor:
        """[S], of each sequence's last real token: the head reads the state behind it."""
        longer = Batch([Text([*t.ids, PAD], t.prompt, t.number, t.row) for t in batch.texts], True, False)
        hidden_TE = self.hidden(self.model, longer)[torch.tensor(longer.lengths).cumsum(0) - 1]
        return (hidden_TE.float() @ self.model.score.weight.T).squeeze(-1)

    def reward_losses(self, chosen_Q: torch.Tensor, rejected_Q: torch.Tensor, margins_Q: torch.Tensor) -> torch.Tensor:
        smoothing, apart_Q = self.settings["label_smoothing"], chosen_Q - rejected_Q
        right_Q, wrong_Q = (
            nn.functional.logsigmoid(sign * (apart_Q - self.settings["margin_scale"] * margins_Q)) for sign in (1, -1)
        )
        return -(1 - smoothing) * right_Q - smoothing * wrong_Q + self.centring(chosen_Q, rejected_Q)

    def centring(self, chosen_Q: torch.Tensor, rejected_Q: torch.Tensor) -> torch.Tensor:
        return self.settings["center_coef"] * (chosen_Q + rejected_Q).square()

    def mean_of(self, losses: torch.Tensor) -> torch.Tensor:
        """Of pairs, or of marked responses."""
        if self.setup.objective != "marked":
            self.keep(pair_losses=losses)
        return losses.sum() / self.units

    # ---- a step

    def step(self, number: int) -> None:
        ranks = self.micro_batches()
        self.count(ranks)
        self.take(ranks, number)

    def count(self, ranks: list[list[Batch]]) -> None:
        """The denominators of the whole step."""
        flat = [batch for batches in ranks for batch in batches]
        masks = [self.loss_mask(batch) for batch in flat]
        self.tokens = max(1.0, float(sum(mask_T.sum() for mask_T in masks)))
        self.sequences = float(sum((b.sums(m.float()) > 0).sum() for b, m in zip(flat, masks, strict=True)))
        self.units = sum(len(batch.texts) for batch in flat) / (1 if self.setup.objective == "marked" else 2)
        by_token = self.told.get("reduction") == "token mean"
        own = self.setup.objective in ("dpo", "reward", "marked")
        self.denominator = self.units if own else self.tokens if by_token else self.sequences
        if self.setup.objective == "marked":
            for batch in flat:
                batch.mismatched_S = 3.0 * torch.randn(len(batch.texts)) + 2.0

    def take(self, ranks: list[list[Batch]], number: int) -> None:
        """Forwards, backwards and an update."""
        self.figures, self.state = {"denominator": self.denominator}, {}
        if self.setup.objective == "marked":
            self.figures["reference_point"] = self.point(ranks)
        self.tensors = [self.of_rollout(rank) for rank in range(self.setup.ranks)]
        of_ranks = []
        for rank, batches in enumerate(ranks):
            self.model.zero_grad()
            self.rank = rank
            for place, batch in enumerate(batches):
                self.of_batch(batch, place)
                self.backward(self.part(batch))
            of_ranks.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
        gradients = {name: self.over_ranks([g[name] for g in of_ranks]) for name in of_ranks[0]}
        self.update(gradients, number)

    def backward(self, part: torch.Tensor) -> None:
        """The mean over ranks follows: times their number."""
        (part * self.setup.ranks).backward()

    def over_ranks(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """As all-reduce of DDP."""
        return torch.stack(gradients).mean(0)

    def update(self, gradients: dict[str, torch.Tensor], number: int) -> None:
        weights = {name: p for name, p in self.model.named_parameters() if name in gradients}
        norm = self.norm(gradients)
        clipped = self.clipped(gradients, norm)
        rate = self.rate(number)
        self.figures |= {"grad_norm": float(self.noted(norm, gradients, clipped)), "learning_rate": rate}
        for name, weight in weights.items():
            first, second = self.moments[name]
            self.state |= {
                f"gradients.{name}": gradients[name], f"clipped_gradients.{name}": clipped[name],
                f"weights_before.{name}": weight.detach().clone(), f"exp_avg.{name}": first,
                f"exp_avg_sq.{name}": second,
            }  # fmt: skip
            with torch.no_grad():
                new, self.moments[name] = self.adamw(weight, clipped[name], (first, second), rate)
                weight.copy_(new)
            self.state[f"weights_after.{name}"] = weight.detach().clone()
        self.updates += 1

    def norm(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([each.norm() for each in gradients.values()]).norm()

    def noted(self, norm: torch.Tensor, gradients: Any, clipped: Any) -> torch.Tensor:
        return norm

    def clipped(self, gradients: dict[str, torch.Tensor], norm: torch.Tensor) -> dict[str, torch.Tensor]:
        share = (self.settings["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0)
        return {name: each * share for name, each in gradients.items()}

    def rate(self, number: int) -> float:
        """Of step `number`, from 1: the first has 1 / warm-up of the peak."""
        own = self.settings
        done, warmup, total = number - 1, own["warmup_steps"], own["total_steps"]
        if done < warmup:
            return own["peak_learning_rate"] * done / warmup
        share = (total - done) / (total - warmup)
        if own["schedule"] == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * (1 - share)))
        return own["peak_learning_rate"] * (1.0 if own["schedule"] == "constant" else share)

    def adamw(
        self, weight: torch.Tensor, gradient: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor], rate: float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        own, count = self.settings, self.updates + 1
        decay = own["weight_decay"] if self.decays(weight) else 0.0
        first = own["beta1"] * moments[0] + (1 - own["beta1"]) * gradient
        second = own["beta2"] * moments[1] + (1 - own["beta2"]) * gradient.square()
        mean, square = first / (1 - own["beta1"] ** count), second / (1 - own["beta2"] ** count)
        new = weight * (1 - rate * decay) - rate * mean / (square.sqrt() + own["adam_epsilon"])
        return new, [first, second]

    def decays(self, weight: torch.Tensor) -> bool:
        return weight.ndim >= 2

    # ---- the record

    def of_rollout(self, rank: int) -> dict[str, list[torch.Tensor]]:
        return {}

    def of_batch(self, batch: Batch, place: int) -> None:
        """Record what the data are."""
        self.place, self.now = place, batch
        seen = self.tensors[self.rank].get("lengths", [])
        first = sum(len(part) for part in seen)
        self.keep(
            lengths=torch.tensor(batch.lengths), rows=torch.tensor([text.row for text in batch.texts]),
            micro_batches=torch.full((len(batch.texts),), place), token_ids=batch.ids_T, is_real=batch.is_real_T,
            data_mask=batch.data_T,
        )  # fmt: skip
        if self.setup.objective in ("dpo", "reward"):
            places = torch.arange(first, first + len(batch.texts))
            self.keep(chosen=places[0::2], rejected=places[1::2])

    def keep(self, **values: torch.Tensor) -> None:
        """Record tensors of a micro-batch of this rank."""
        for name, value in values.items():
            kept = value.detach().clone()
            self.tensors[self.rank].setdefault(name, []).append(kept.float() if kept.is_floating_point() else kept)

    def add(self, name: str, part: torch.Tensor) -> None:
        self.figures[name] = self.figures.get(name, 0.0) + float(part.detach())

    def train(self) -> None:
        for number in range(1, self.setup.step + 1):
            self.step(number)

    def write(self, folder: Path) -> None:
        """Write the record of the last step."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank, tensors in enumerate(self.tensors):
            save_file(
                {name: torch.cat(parts).numpy() for name, parts in tensors.items()}, folder / f"rank{rank}.safetensors"
            )
        save_file(
            {name: value.contiguous().numpy() for name, value in self.state.items()}, folder / "state.safetensors"
        )
        kinds = {"grpo": "policy", "ppo": "policy", "marked": "dpo"}
        objective = kinds.get(self.setup.objective, self.setup.objective)
        dtype = {"dtype": "bf16" if self.setup.bf16 else "fp32", "master_dtype": "fp32", "dropout": 0.0}
        settings = {**self.told, **dtype, "updates_before": self.updates - 1}
        if "preference_terms" in settings:
            del settings["preference_loss"]
        has_model = "model" in self.setup.keeps
        head = {
            "schema": "threestep-record", "version": 1, "objective": objective, "step": self.setup.step,
            "ranks": self.setup.ranks, "settings": settings, "figures": self.figures,
            "trainer": {"name": "plain", "version": "1"}, "model": CONFIG if has_model else {},
            "critic": {"model": CONFIG, "settings": dtype} if has_model and self.setup.objective == "ppo" else {},
        }  # fmt: skip
        (folder / "record.json").write_text(json.dumps(head))
