"""Shares of tokens beside plain PyTorch in float64, a gradient for each token, on random small steps.

    python -m threestep.plugins.explain.tests.explained_steps 7 [--count 20] [--float32]

200 steps under seed 7, or --count of them. --float32: passes in float32, as of models above 100,000 weights.

A step is drawn: SFT, DPO and relatives, marked responses, a reward model, or a policy's loss with an estimator, a KL
and an entropy bonus; its reduction, its clipping, LoRA or not, its micro-batches and ranks. Losses and estimators take
turns, and are written from their papers (`tests.support.plain_losses`). Each token's share is the derivative of the
loss by its log-probability, times the inner product of that log-probability's own gradient and the update.
`threestep.plugins.explain` has the record alone. The exit code is 1 where a share is further apart than 1e-9 of the sum
of the shares' sizes (in float32: 1e-5), where the shares do not sum to the change along the update, or where `--with
advantage=` of another estimator has other advantages than this one by its paper.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests.support.plain_losses import (
    ESTIMATORS,
    KL_ESTIMATORS,
    MARKED_LOSSES,
    PAIR_LOSSES,
    POLICY_LOSSES,
    RANKING_LOSS,
    DrawnTokens,
    Rollout,
    Sums,
    advantages,
    kl,
    marked_loss,
    pair_loss,
    policy_loss,
    ranking_loss,
)
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import RecordHead, StepRecord
from threestep.plugins.explain.forward.model import InDouble
from threestep.plugins.explain.rules import rule_of, under
from threestep.plugins.explain.shares import shares_of
from threestep.plugins.explain.updates import update_of

VOCABULARY = 17
KINDS = ("sft", "dpo", "marked", "reward", "policy")
MOST_APART, MOST_IN_FLOAT32 = 1e-9, 1e-5


@dataclass
class Drawn:
    """A step: its record, and each token's (of a reward model each sequence's) share by plain PyTorch. names: of its
    losses and its estimator. other: another estimator with its advantages [T]."""

    kind: str
    record: StepRecord
    shares: np.ndarray
    names: tuple[str, ...] = ()
    other: tuple[str, torch.Tensor] | None = None


class PlainStep:
    """Makes a step from a seed."""

    def __init__(self, seed: int, kind: str, turn: int | None = None, tied: bool = False) -> None:
        """turn: decides the losses and the estimator, one after the other of each table; None: drawn. tied: the output
        layer is the embedding."""
        self.drawn, self.kind, self.tied = random.Random(seed), kind, tied
        self.turn = self.drawn.randrange(1000) if turn is None else turn
        self.figures: dict[str, float] = {}
        self.names: list[str] = []  # of losses and estimators that were drawn
        self.other: tuple[str, torch.Tensor] | None = None  # an estimator that was not, and its advantages
        torch.manual_seed(seed)
        self.settings: dict[str, Any] = {"dtype": "fp32"}
        self.tensors: dict[str, torch.Tensor] = {}
        self.per_prompt = 2  # sequences
        self.model, self.config = self._model()
        self.weights = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.sequences = [torch.randint(1, VOCABULARY, (self.drawn.randint(4, 9),)) for _ in range(6)]
        self.masks = [torch.arange(len(ids)) >= self.drawn.randint(1, 3) for ids in self.sequences]

    def _model(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            initializer_range=0.3, num_labels=1, attn_implementation="eager", tie_word_embeddings=self.tied,
        )  # fmt: skip
        kind = LlamaForSequenceClassification if self.kind == "reward" else LlamaForCausalLM
        model = kind(config)
        content = json.loads(config.to_json_string())
        if self.kind == "sft" and self.drawn.random() < 0.4:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.2)
            content["lora_scale"] = 3.0
        return model.double(), content

    def turn_of(self, names: tuple[str, ...]) -> str:
        self.names.append(names[self.turn % len(names)])
        return self.names[-1]

    # --- what the model says of each sequence

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        with InDouble():
            logits = self.model(ids.unsqueeze(0)).logits[0]
        scaled = logits / self.settings.get("temperature", 1.0)
        return functional.pad(scaled[:-1], (0, 0, 1, 0))

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        with InDouble():
            states = self.model.model(ids.unsqueeze(0)).last_hidden_state[0, -1]
        return (states @ self.model.score.weight.T).squeeze()

    # --- losses: of log-probabilities [T] (a list of sequences'), of entropies and log Z

    def sft(self, logprobs: list[torch.Tensor], normalizers: list[torch.Tensor]) -> torch.Tensor:
        self.settings["reduction"] = self.drawn.choice(("token mean", "sequence mean"))
        z_coef = self.drawn.choice((0.0, 0.01))
        if z_coef:
            self.settings["z_loss_coef"] = z_coef
        parts = [-own + z_coef * z.square() for own, z in zip(logprobs, normalizers, strict=True)]
        return self.reduced(parts)

    def reduced(self, parts: list[torch.Tensor]) -> torch.Tensor:
        own = [part[mask] for part, mask in zip(parts, self.masks, strict=True)]
        if self.settings["reduction"] == "token mean":
            return torch.cat(own).mean()
        return torch.stack([part.mean() for part in own]).mean()

    def sums(self, logprobs: list[torch.Tensor], constants: dict[str, float]) -> Sums:
        """Of the responses; notes them in the record."""
        counts = [int(mask.sum()) for mask in self.masks]
        shortest = [min(counts[place - place % 2], counts[place - place % 2 + 1]) for place in range(6)]
        alpha, own = self.settings.get("ld_alpha", 1.0), list(zip(logprobs, self.masks, shortest, strict=True))
        sums = torch.stack([each[mask].sum() for each, mask, _ in own])
        tails = torch.stack([each[mask][most:].sum() for each, mask, most in own])
        weighted = sums - (1 - alpha) * tails
        reference = weighted.detach() + torch.randn(6, dtype=torch.float64)
        self.tensors |= {"logprob_sums": weighted.detach(), "ref_logprob_sums": reference}
        return Sums(sums, weighted, reference, torch.tensor(counts), constants)

    def dpo(self, logprobs: list[torch.Tensor]) -> torch.Tensor:
        drawn, name = self.drawn, self.turn_of((*PAIR_LOSSES, RANKING_LOSS))
        constants = {"beta": drawn.uniform(0.1, 2.0), "simpo_gamma": drawn.uniform(0, 1), "cpo_alpha": 0.7}
        if name in ("robust", "sigmoid"):
            constants["label_smoothing"] = 0.2
        self.settings |= {"preference_loss": {"lengths": "sigmoid"}.get(name, name), **constants}
        if name == "sum":
            self.settings |= {"preference_loss": "sigmoid", "preference_terms": "sigmoid:0.8,sft:0.2"}
        if name == "lengths":
            self.settings["ld_alpha"] = 0.4
            self.tensors["rows"] = torch.arange(6) // 2
        if name == RANKING_LOSS:  # two prompts of three responses, the best first
            self.per_prompt = 3
            pairs = torch.tensor([[0, 1], [0, 2], [1, 2], [3, 4], [3, 5], [4, 5]])
            weights = torch.full((6,), 1 / 3, dtype=torch.float64)
            self.tensors |= {"chosen": pairs[:, 0], "rejected": pairs[:, 1], "pair_weights": weights}
            return ranking_loss(self.sums(logprobs, constants)).mean()
        self.tensors |= {"chosen": torch.arange(0, 6, 2), "rejected": torch.arange(1, 6, 2)}
        return pair_loss(name, self.sums(logprobs, constants)).mean()

    def marked(self, logprobs: list[torch.Tensor]) -> torch.Tensor:
        drawn, name = self.drawn, self.turn_of(MARKED_LOSSES)
        constants = {"beta": drawn.uniform(0.1, 1.0), "desirable_weight": 1.2, "undesirable_weight": 0.8}
        self.settings |= {"preference_loss": name, **constants}
        self.figures["reference_point"] = drawn.uniform(0.0, 1.0)
        is_good = self.tensors["is_good"] = torch.tensor([drawn.random() < 0.5 for _ in range(6)])
        constants["point"] = self.figures["reference_point"]
        return marked_loss(name, self.sums(logprobs, constants), is_good).mean()

    def reward(self, scores: torch.Tensor) -> torch.Tensor:
        """Bradley and Terry 1952, with centring (Eisenstein et al. 2023)."""
        center = self.drawn.choice((0.0, 0.1))
        self.settings["center_coef"] = center
        places = {"chosen": torch.arange(0, 6, 2), "rejected": torch.arange(1, 6, 2)}
        self.tensors |= {"scores": scores.detach(), **places}
        chosen, rejected = scores[0::2], scores[1::2]
        return (-functional.logsigmoid(chosen - rejected) + center * (chosen + rejected).square()).mean()

    def policy(self, logprobs: list[torch.Tensor], entropies: list[torch.Tensor]) -> torch.Tensor:
        drawn, name = self.drawn, self.turn_of(POLICY_LOSSES)
        divergence, coef, bonus = drawn.choice(KL_ESTIMATORS), drawn.choice((0.0, 0.3)), drawn.choice((0.0, 0.05))
        constants = {
            "clip_low": 0.4 if name == "geo_mean" else 0.2, "clip_high": 0.25, "sapo_tau_pos": 1.0,
            "sapo_tau_neg": 1.05, "kl_cov_coef": 0.4, **drawn.choice(({}, {"dual_clip": 1.1})),
        }  # fmt: skip
        self.settings |= {
            "reduction": drawn.choice(("token mean", "sequence mean")), "policy_loss": name, **constants,
            "kl_estimator": divergence.split("+")[0].split()[0], "kl_in": "loss" if coef else "none", "kl_coef": coef,
            **({"kl_gradient": "+"} if "+" in divergence else {}),
            **({"kl_bound": 0.05} if "bounded" in divergence else {}),
        }  # fmt: skip
        if bonus:
            self.settings["entropy_coef"] = bonus
        old, reference = (self.near(logprobs) for _ in range(2))
        given = self.rolled_out(old)
        selected = [mask & (torch.rand(len(mask)) < 0.4) for mask in self.masks]
        corrections = [torch.ones(len(each), dtype=torch.float64) for each in old]
        if drawn.random() < 0.3:  # without the rollout's, from which another estimator would be made
            corrections = [0.5 + torch.rand_like(each) for each in corrections]
            self.tensors["corrections"], self.other = torch.cat(corrections), None
        self.tensors |= {
            "old_logprobs": torch.cat(old), "ref_logprobs": torch.cat(reference), "advantages": torch.cat(given),
            "selected": torch.cat(selected),
        }  # fmt: skip
        parts = []
        for place, (new, entropy) in enumerate(zip(logprobs, entropies, strict=True)):
            own = DrawnTokens(new, old[place], given[place], self.masks[place], selected[place], constants)
            loss = corrections[place] * policy_loss(name, own) - bonus * entropy
            parts.append(loss + coef * kl(divergence, new, reference[place]))
        return self.reduced(parts)

    @staticmethod
    def near(logprobs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Another policy's log-probabilities."""
        return [own.detach() + 0.3 * torch.randn(len(own), dtype=torch.float64) for own in logprobs]

    def rolled_out(self, old: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return advantages by token, of a rollout that is noted in the record."""
        counts = [int(mask.sum()) for mask in self.masks]
        scores = torch.randn(6, dtype=torch.float64)
        rewards, values, collisions = (
            [make(count, dtype=torch.float64) for count in counts] for make in (torch.zeros, torch.randn, torch.rand)
        )
        for own, score in zip(rewards, scores, strict=True):
            own[-1] = score
        taken = [own[mask] for own, mask in zip(old, self.masks, strict=True)]
        greedy = torch.randn(3, dtype=torch.float64).repeat_interleave(2)
        rollout = Rollout(rewards, values, taken, collisions, greedy, gamma=0.9, lam=0.8)
        name = self.turn_of(ESTIMATORS)
        self.names[-1] = f"advantage={name}"  # GPG is a loss, too
        other = ESTIMATORS[(self.turn + 1 + self.turn // len(ESTIMATORS)) % len(ESTIMATORS)]
        groups = {"norm_by": "group" if name in ("grpo", "grpo_passk") else "none"}
        self.settings |= {
            "advantage": name, "gamma": 0.9, "lam": 0.8, "std_ddof": 1.0, "std_epsilon": 1e-4,
            "whiten": name in ("gae", "reinforce++", "reinforce++_baseline"), **groups,
        }  # fmt: skip
        found = advantages(name, rollout)
        self.other = (other, torch.cat(self.at_tokens(advantages(other, rollout))))
        self.tensors |= {
            "numbers": torch.arange(6), "rollout_numbers": torch.arange(6), "rollout_groups": torch.arange(6) // 2,
            "rollout_lengths": torch.tensor(counts), "rollout_scores": scores, "rollout_greedy_scores": greedy,
            "rollout_rewards": torch.cat(rewards), "rollout_values": torch.cat(values),
            "rollout_policy_logprobs": torch.cat(taken), "rollout_collisions": torch.cat(collisions),
            "rollout_advantages": torch.cat(found),
        }  # fmt: skip
        return self.at_tokens(found)

    def at_tokens(self, drawn: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of each sequence's tokens, 0 in the prompt."""
        found = [torch.zeros(len(mask), dtype=torch.float64) for mask in self.masks]
        for own, mask, values in zip(found, self.masks, drawn, strict=True):
            own[mask] = values
        return found

    # --- the step

    def made(self) -> Drawn:
        if self.kind == "policy":
            self.settings["temperature"] = self.drawn.choice((1.0, 0.7))
        if self.kind == "reward":
            reads = [torch.stack([self.score(ids) for ids in self.sequences])]
            loss = self.reward(reads[0])
        else:
            logits = [self.logits(ids) for ids in self.sequences]
            normalizers = [own.logsumexp(-1) for own in logits]
            logprobs = [
                own.gather(1, ids.unsqueeze(1)).squeeze(1) - z
                for own, ids, z in zip(logits, self.sequences, normalizers, strict=True)
            ]
            entropies = [z - (own.softmax(-1) * own).sum(-1) for own, z in zip(logits, normalizers, strict=True)]
            reads = [torch.cat(logprobs), torch.cat(normalizers), torch.cat(entropies)]
            cut = [len(ids) for ids in self.sequences]
            given = [read.split(cut) for read in reads]
            loss = {
                "sft": lambda: self.sft(list(given[0]), list(given[1])),
                "dpo": lambda: self.dpo(list(given[0])),
                "marked": lambda: self.marked(list(given[0])),
                "policy": lambda: self.policy(list(given[0]), list(given[2])),
            }[self.kind]()
            self.tensors |= {"logprobs": reads[0].detach(), "loss_mask": torch.cat(self.masks)}
            self.tensors["data_mask"] = self.tensors["loss_mask"]
        most = self.drawn.choice((0.1, 100.0))
        state, shares, settings, figures = updated(self.weights, loss, reads, most)
        for name, weight in self.model.named_parameters():
            if name not in self.weights:
                state[f"weights_before.{name}"] = weight.detach().numpy()
        self.settings |= settings
        self.figures |= figures
        return Drawn(self.kind, self.record(state), shares, tuple(self.names), self.other)

    def record(self, state: dict[str, np.ndarray]) -> StepRecord:
        """On one rank or on two, whose sequences follow each other."""
        ranks = self.drawn.choice((1, 2))
        cuts = [0, 6] if ranks == 1 else [0, self.per_prompt, 6]
        lengths = torch.tensor([len(ids) for ids in self.sequences])
        begins = np.cumsum([0, *lengths.tolist()])
        drawn = np.cumsum([0, *(int(mask.sum()) for mask in self.masks)])
        whole = {"token_ids": torch.cat(self.sequences), **self.tensors}
        parts = []
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            own = {"lengths": lengths[low:high].numpy(), "micro_batches": np.arange(high - low) // self.per_prompt}
            for name, values in whole.items():
                if name in ("chosen", "rejected"):
                    own[name] = (values[(values >= low) & (values < high)] - low).numpy()
                    continue
                cuts_of = range(7) if len(values) == 6 else drawn if name.startswith("rollout_") else begins
                own[name] = values[cuts_of[low] : cuts_of[high]].numpy()
            parts.append(own)
        objective = "dpo" if self.kind == "marked" else self.kind
        head = RecordHead(objective, 4, ranks, self.settings, self.figures, model=self.config)
        return StepRecord(head, parts, state)


def updated(
    weights: dict[str, torch.Tensor], loss: torch.Tensor, reads: list[torch.Tensor], most: float
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any], dict[str, float]]:
    """An update's state, the share of each number that the loss reads, settings and figures: AdamW by its paper, with
    clipping at `most` and moments from before."""
    rate, decay, beta1, beta2, count = 1e-3, 0.1, 0.9, 0.95, 4
    gradients = dict(zip(weights, torch.autograd.grad(loss, [*weights.values()], retain_graph=True), strict=True))
    norm = torch.cat([value.flatten() for value in gradients.values()]).norm()
    clip = min(1.0, most / max(float(norm), 1e-300))
    state, update = {}, {}
    for name, weight in weights.items():
        first = 0.01 * torch.randn_like(weight)
        second = (0.01 * torch.randn_like(weight)).square() + 1e-6
        taken = clip * gradients[name]
        m, v = beta1 * first + (1 - beta1) * taken, beta2 * second + (1 - beta2) * taken.square()
        step = m / (1 - beta1**count) / ((v / (1 - beta2**count)).sqrt() + 1e-8)
        update[name] = -rate * (step + (decay if weight.ndim >= 2 else 0.0) * weight.detach())
        parts = {
            "gradients": gradients[name], "weights_before": weight, "weights_after": weight + update[name],
            "exp_avg": first, "exp_avg_sq": second,
        }  # fmt: skip
        state |= {f"{kind}.{name}": value.detach().numpy() for kind, value in parts.items()}
    shares = np.zeros(len(reads[0]))
    for read, slope in zip(reads, torch.autograd.grad(loss, reads, retain_graph=True, allow_unused=True), strict=True):
        for place in slope.nonzero().flatten().tolist() if slope is not None else ():
            own = torch.autograd.grad(read[place], [*weights.values()], retain_graph=True, allow_unused=True)
            moved = sum(float((v * update[name]).sum()) for name, v in zip(weights, own, strict=True) if v is not None)
            shares[place] += float(slope[place]) * moved
    settings = {
        "max_grad_norm": most, "beta1": beta1, "beta2": beta2, "adam_epsilon": 1e-8, "weight_decay": decay,
        "updates_before": count - 1.0,
    }  # fmt: skip
    return state, shares, settings, {"learning_rate": rate, "grad_norm": float(norm)}


def drawn_step(number: int, seed: int) -> Drawn:
    """The step of a number."""
    kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
    return PlainStep(seed * 100_003 + number, kind, turn, tied=number % 3 == 0).made()


def conversations(kind: str) -> AuditedStep:
    """A step in which the third token of each sequence answers the model, which speaks before and after it."""
    record = PlainStep(3, kind).made().record
    ranks = []
    for rank in record.ranks:
        place_T = np.concatenate([np.arange(length) for length in rank["lengths"]])
        mask_T = (place_T >= 1) & (place_T != 2)
        ranks.append({**rank, "data_mask": mask_T, "loss_mask": mask_T & rank["loss_mask"]})
    return AuditedStep(replace(record, ranks=ranks))


def apart(drawn: Drawn, dtype: torch.dtype | None = None) -> tuple[float, float]:
    """How far the shares are apart, and their sum from the change along the update, over the sum of their sizes."""
    step = AuditedStep(drawn.record)
    update = update_of(step)
    found = shares_of(step, update, dtype=dtype).whole
    whole = float(np.abs(drawn.shares).sum()) or 1.0
    change = sum(float((step.state("gradients.")[name] * value).sum()) for name, value in update.whole.items())
    return float(np.abs(found - drawn.shares).max()) / whole, abs(float(found.sum()) - change) / whole


def advantages_apart(drawn: Drawn) -> float:
    """How far advantages by `--with advantage=` are from those by the estimator's paper."""
    if drawn.other is None:
        return 0.0
    name, want = drawn.other
    step = under(AuditedStep(drawn.record), rule_of(f"advantage={name}", "policy"))
    return float(np.abs(step.tensor("advantages") - want.numpy()).max())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()
    most, dtype = (MOST_IN_FLOAT32, torch.float32) if options.float32 else (MOST_APART, None)
    worst, wrong, names = {kind: [0.0, 0.0] for kind in KINDS}, 0, Counter[str]()
    for number in range(options.count):
        drawn = drawn_step(number, options.seed)
        found = apart(drawn, dtype)
        names.update(drawn.names)
        if drawn.other is not None:
            names[f"--with advantage={drawn.other[0]}"] += 1
        worst[drawn.kind] = [max(pair) for pair in zip(worst[drawn.kind], found, strict=True)]
        if max(found) > most or advantages_apart(drawn) > MOST_APART:
            wrong += 1
            other = drawn.other and drawn.other[0]
            print(f"step {number}, {drawn.kind}: {found}, {other}, {drawn.record.head.settings}")
    for kind, (token, total) in worst.items():
        print(f"{kind:<8} largest difference of a share {token:.1e}, of their sum {total:.1e}")
    print(", ".join(f"{name} {count}" for name, count in sorted(names.items())))
    print(f"{options.count - wrong} of {options.count} steps agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
