"""What the engine is compared with: plain PyTorch, one sequence at a time, no padding, no planner, no DeepSpeed.

AdamW, clipping and the cosine schedule are written out or taken from torch, in float64 unless asked otherwise.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn

from tests.support import plain_losses
from training.utils.contracts.rows import MarkedRow, ResponsesRow, SentenceRow
from training.utils.layout.order import ShuffledStream


def batches_of(rows: Sequence, per_step: int, seed: int) -> list[list]:
    """The rows of each optimizer step of one epoch, in the order in which the trainers take them."""
    order = ShuffledStream(len(rows), seed).take(0, len(rows))
    return [[rows[row] for row in order[start : start + per_step]] for start in range(0, len(rows), per_step)]


@dataclass(frozen=True)
class Recipe:
    """What a run trains with; see EngineSettings for the names."""

    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    max_grad_norm: float = 6.6
    num_warmup_steps: int = 1
    total_steps: int = 4
    betas: tuple[float, float] = (0.9, 0.95)

    def rate(self, step: int) -> float:
        """Linear from 0, then half a cosine to 0; `step` counts from 0."""
        if step < self.num_warmup_steps:
            return self.learning_rate * step / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / (self.total_steps - self.num_warmup_steps)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Trained:
    """losses: before each step. norms: of the gradient before clipping. weights: after the last step."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


class Stepper:
    """AdamW on named weights, of which vectors are not decayed, with a clip of the gradients' norm."""

    def __init__(
        self, weights: dict[str, nn.Parameter], decay: float, max_norm: float, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        self.weights, self.max_norm = list(weights.values()), max_norm
        groups = [
            {"params": [p for p in self.weights if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in self.weights if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, foreach=False)

    def step(self, rate: float) -> float:
        """Step by the weights' gradients; return their norm before clipping."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = torch.sqrt(sum(gradient.double().square().sum() for gradient in gradients))
        for gradient in gradients if norm > self.max_norm else ():
            gradient.mul_(self.max_norm / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(norm)


def train(
    model: nn.Module, batches: Sequence[list], loss_of: Callable[[nn.Module, list], torch.Tensor], recipe: Recipe
) -> Trained:
    """One AdamW step a batch."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepper = Stepper(parameters, recipe.weight_decay, recipe.max_grad_norm, recipe.betas)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(stepper.step(recipe.rate(step)))
        losses.append(float(loss.detach()))
    return Trained(losses, norms, {name: p.detach().clone() for name, p in parameters.items()})


def residual(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], start: nn.Module) -> float:
    """How far the weights `got` are from `want`, as a share of how far these are from those of `start`."""
    first = start.state_dict()
    update = torch.cat([(want[name].detach().double() - first[name].double()).flatten() for name in want])
    apart = torch.cat([(got[name].double() - want[name].detach().double()).flatten() for name in want])
    return float(apart.norm() / update.norm())


def token_logprobs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """log p(ids[t] | ids[:t]) for t = 1, 2, ...; the sequence stands alone in its batch."""
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)


def sft_loss(
    model: nn.Module, batch: list[SentenceRow], seeds: Sequence[int] = (), alpha: float = 0.0, z_loss_coef: float = 0.0
) -> torch.Tensor:
    """The mean over all tokens of the batch whose loss_mask is True of -log p + z_loss_coef log^2 Z. With `seeds` each
    sequence of L tokens has noise from its own on its embeddings: uniform in [-1, 1] x alpha / sqrt(L H)."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for place, row in enumerate(batch):
        ids = torch.tensor(row.input_ids, dtype=torch.int64)
        embeddings = model.get_input_embeddings()(ids)
        if seeds:
            generator = torch.Generator().manual_seed(seeds[place])
            unit = torch.empty(embeddings.shape).uniform_(-1.0, 1.0, generator=generator)
            embeddings = embeddings + unit.double() * alpha / math.sqrt(embeddings.numel())
        logits = model(inputs_embeds=embeddings.unsqueeze(0)).logits[0, :-1].double()
        mask = torch.tensor(row.loss_mask)[1:]
        normalizers = torch.logsumexp(logits, dim=-1)
        nll = normalizers - logits.gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)
        total = total + (nll + z_loss_coef * normalizers**2)[mask].sum()
        count += int(mask.sum())
    return total / count


def token_accuracy(model: nn.Module, batch: Sequence[SentenceRow]) -> float:
    """The share of the tokens whose loss_mask is True that have the largest logit."""
    right, count = 0, 0
    for row in batch:
        ids = torch.tensor(row.input_ids, dtype=torch.int64)
        with torch.no_grad():
            first_choice = model(input_ids=ids.unsqueeze(0)).logits[0, :-1].argmax(-1)
        mask = torch.tensor(row.loss_mask)[1:]
        right += int((first_choice == ids[1:])[mask].sum())
        count += int(mask.sum())
    return right / count


def score(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """The one label of a sequence that stands alone: transformers reads it at the last token."""
    return model(input_ids=torch.tensor([list(ids)], dtype=torch.int64)).logits[0, 0]


def ranking_loss(
    model: nn.Module,
    batch: list[ResponsesRow],
    margin_scale: float = 0.0,
    label_smoothing: float = 0.0,
    center_coef: float = 0.0,
) -> torch.Tensor:
    """The mean over prompts of the mean over their pairs of -log sigmoid(better - worse), with margins, label smoothing
    and centring."""
    per_prompt = []
    for row in batch:
        scores = [score(model, [*row.prompt_ids, *response]) for response in row.response_ids]
        losses = []
        for first, second in combinations(range(len(scores)), 2):
            margin = 0.0 if row.margins is None else sum(row.margins[first:second].tolist())
            gap = scores[first] - scores[second] - margin_scale * margin
            sides = nn.functional.logsigmoid(gap), nn.functional.logsigmoid(-gap)
            loss = -(1 - label_smoothing) * sides[0] - label_smoothing * sides[1]
            losses.append(loss + center_coef * (scores[first] + scores[second]) ** 2)
        per_prompt.append(torch.stack(losses).mean())
    return torch.stack(per_prompt).mean()


def preference_loss(
    reference: nn.Module, loss_type: str, beta: float, label_smoothing: float, sft_coef: float, ld_alpha: float = 1.0
) -> Callable[[nn.Module, list], torch.Tensor]:
    """A loss_of: the mean over prompts of the mean over their pairs of DPO's loss or another; SimPO's margin is 0.5."""
    constants = {"beta": beta, "label_smoothing": label_smoothing, "simpo_gamma": 0.5}
    likelihood = sft_coef + (1.0 if loss_type in ("orpo", "cpo") else 0.0)

    def weighted(logprobs: torch.Tensor, shortest: int) -> torch.Tensor:
        return logprobs[:shortest].sum() + ld_alpha * logprobs[shortest:].sum()

    def loss_of(model: nn.Module, batch: list[ResponsesRow]) -> torch.Tensor:
        per_prompt = []
        for row in batch:
            shortest = min(map(len, row.response_ids))
            now, then = [], []
            for response in row.response_ids:
                ids = torch.tensor([*row.prompt_ids, *response], dtype=torch.int64)
                now.append(token_logprobs(model, ids)[-len(response) :].double())
                with torch.no_grad():
                    then.append(token_logprobs(reference, ids)[-len(response) :].double())
            order = [place for pair in combinations(range(len(now)), 2) for place in pair]
            if loss_type == "plackett_luce":
                order = list(range(len(now)))
            sums = plain_losses.Sums(
                torch.stack([now[place].sum() for place in order]),
                torch.stack([weighted(now[place], shortest) for place in order]),
                torch.stack([weighted(then[place], shortest) for place in order]),
                torch.tensor([len(now[place]) for place in order]),
                constants,
            )
            if loss_type == "plackett_luce":
                per_prompt.append(plain_losses.ranking_loss(sums, len(now)).sum())
            else:
                per_prompt.append(plain_losses.comparison(loss_type, sums).mean() - likelihood * now[0].mean())
        return torch.stack(per_prompt).mean()

    return loss_of


def marked_loss(
    reference: nn.Module, others: dict[int, Sequence[int]], loss_type: str, beta: float, weights: tuple[float, float]
) -> Callable[[nn.Module, list], torch.Tensor]:
    """A loss_of: KTO, or BCO, of a whole optimizer step (or evaluation). others: for each row its mismatched response.
    weights: of good and of bad responses."""

    def ratio(model: nn.Module, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([*prompt, *response], dtype=torch.int64)
        now = token_logprobs(model, ids)[-len(response) :].double()
        with torch.no_grad():
            then = token_logprobs(reference, ids)[-len(response) :].double()
        return (now - then).sum()

    def loss_of(model: nn.Module, batch: list[MarkedRow]) -> torch.Tensor:
        ratios = [ratio(model, row.prompt_ids, row.response_ids[0]) for row in batch]
        with torch.no_grad():
            if loss_type == "kto":
                mismatched = [float(ratio(model, row.prompt_ids, others[row.row_id])) for row in batch]
                z = max(0.0, sum(mismatched) / len(batch))
            else:
                sides = [
                    [float(r) for r, row in zip(ratios, batch, strict=True) if row.is_good is s] for s in (True, False)
                ]
                means = [sum(side) / len(side) for side in sides if side]
                z = sum(means) / len(means)
        constants = dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
        stacked_S, none_S = torch.stack(ratios), torch.zeros(len(ratios), dtype=torch.float64)
        sums = plain_losses.Sums(stacked_S, stacked_S, none_S, none_S, {"beta": beta, "point": z, **constants})
        return plain_losses.marked_loss(loss_type, sums, torch.tensor([row.is_good for row in batch])).mean()

    return loss_of


@contextlib.contextmanager
def recorded_routers(model: nn.Module) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Inside, each forward of the trunk adds its router logits to the list, one tensor a layer."""
    read: list[tuple[torch.Tensor, ...]] = []
    trunk = model.base_model
    hooks = (
        trunk.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "output_router_logits": True}), with_kwargs=True
        ),
        trunk.register_forward_hook(lambda module, args, output: read.append(output.router_logits)),
    )
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


def balancing(read: list[tuple[torch.Tensor, ...]], top_k: int) -> tuple[torch.Tensor, float]:
    """Return E sum_e f_e P_e over all tokens that were read, and the largest share of a layer's choices x E."""
    layers = [torch.softmax(torch.cat(parts).double(), -1) for parts in zip(*read, strict=True)]
    chosen = [torch.zeros_like(p).scatter_(1, p.topk(top_k).indices, 1.0).detach() for p in layers]
    experts = layers[0].shape[1]
    loss = experts * (torch.cat(chosen).mean(0) * torch.cat(layers).mean(0)).sum()
    return loss, experts * max(float((part.sum(0) / part.sum()).max()) for part in chosen)


def with_router_loss(
    loss_of: Callable[[nn.Module, list], torch.Tensor], top_k: int, coefficient: float, seen: list[tuple[float, ...]]
) -> Callable[[nn.Module, list], torch.Tensor]:
    """A loss_of, of a mixture of experts that reads every sequence of the batch alone: the same plus the coefficient x
    E sum_e f_e P_e over all their tokens. seen: gains (that sum, the largest share of a layer's choices x E, the loss
    without it) of each batch."""

    def router_loss_of(model: nn.Module, batch: list) -> torch.Tensor:
        with recorded_routers(model) as read:
            own = loss_of(model, batch)
        loss, largest = balancing(read, top_k)
        seen.append((float(loss.detach()), largest, float(own.detach())))
        return own + coefficient * loss

    return router_loss_of


def train_mixed(
    model: nn.Module, batches: Sequence[list], loss_of: Callable[[nn.Module, list], torch.Tensor], recipe: Recipe
) -> Trained:
    """The same in bfloat16 with float32 master weights and float32 gradients."""
    work = dict(model.to(torch.bfloat16).named_parameters())
    master = {name: nn.Parameter(p.detach().float().clone()) for name, p in work.items()}
    stepper = Stepper(master, recipe.weight_decay, recipe.max_grad_norm, recipe.betas)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for name, parameter in master.items():
            parameter.grad = work[name].grad.float()
        norms.append(stepper.step(recipe.rate(step)))
        with torch.no_grad():
            for name, parameter in master.items():
                work[name].copy_(parameter)
        losses.append(float(loss.detach()))
    return Trained(losses, norms, {name: p.detach().clone() for name, p in work.items()})
