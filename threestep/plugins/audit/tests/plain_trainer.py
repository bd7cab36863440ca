"""A plain trainer in PyTorch that writes records: right steps, and steps with one fault planted.

It shares no code with the judge's references. `FAULTS` is the table: the objective, the fault's name, the quantity that
is wrong, and words of the cause. Those of `examined.plain_faults` are not planted again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from threestep.plugins.audit.recording.files import RecordHead, StepRecord

VOCABULARY, END = 24, 1


class Tiny(nn.Module):
    """Predicts each token from the mean of those up to the one before it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)
        nn.init.normal_(self.embed.weight, std=2.0)
        nn.init.normal_(self.head.weight, std=0.7)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        self.to(dtype)

    def forward(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """Return float32 [N, T, V]: logits that predict each token, from the tokens before it."""
        states = self.embed(ids_NT).cumsum(1) / torch.arange(1, ids_NT.shape[1] + 1).view(1, -1, 1)
        logits_NTV = self.head(self.norm(states.to(self.norm.weight.dtype))).float()
        return functional.pad(logits_NTV[:, :-1], (0, 0, 1, 0))


@dataclass
class Setting:
    """One case. padded: rows are padded to the longest of a micro-batch, and the record has the padding."""

    seed: int
    fault: str = ""
    ranks: int = 1
    padded: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """ids: int64 [T]. mask: bool [T], True on tokens of responses. number: in the data."""

    ids: torch.Tensor
    mask: torch.Tensor
    number: int


class PlainTrainer:
    """Makes the record of one step. `self.fault` is compared where the fault is planted."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.fault = setting, setting.fault
        torch.manual_seed(setting.seed)
        self.model, self.reference = Tiny(setting.dtype), Tiny(setting.dtype)
        self.random = torch.Generator().manual_seed(setting.seed + 1)
        self.tensors: list[dict[str, list[torch.Tensor]]] = [{} for _ in range(setting.ranks)]
        self.settings: dict[str, Any] = {}
        self.figures: dict[str, float] = {}
        self.state: dict[str, np.ndarray] = {}

    # --- data

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def ids(self, count: int) -> torch.Tensor:
        return torch.randint(2, VOCABULARY, (count,), generator=self.random)

    def floats(self, count: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(count, generator=self.random) * scale

    def row(self, number: int, turns: int = 2, prompt: torch.Tensor | None = None) -> Row:
        parts, masks = [], []
        for _ in range(turns):
            asked = self.ids(self.number(2, 5)) if prompt is None else prompt
            answer = torch.cat([self.ids(self.number(1, 7)), torch.tensor([END])])
            parts += [asked, answer]
            masks += [torch.zeros(len(asked), dtype=torch.bool), torch.ones(len(answer), dtype=torch.bool)]
        return Row(torch.cat(parts), torch.cat(masks), number)

    def split(self, rows: list[Any]) -> list[list[list[Any]]]:
        """Rows by rank and micro-batch, of uneven sizes; the last has one row."""
        by_rank = [rows[rank :: self.setting.ranks] for rank in range(self.setting.ranks)]
        return [[own[:3], own[3:-1], own[-1:]] for own in by_rank]

    def put(self, rank: int, **tensors: Any) -> None:
        for name, values in tensors.items():
            self.tensors[rank].setdefault(name, []).append(torch.as_tensor(values))

    def batch(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, data mask and real mask, [N, T]."""
        width = max(len(row.ids) for row in rows)
        ids, mask, real = (torch.zeros(len(rows), width, dtype=kind) for kind in (torch.int64, torch.bool, torch.bool))
        for n, row in enumerate(rows):
            ids[n, : len(row.ids)], mask[n, : len(row.ids)], real[n, : len(row.ids)] = row.ids, row.mask, True
        return ids, mask, real

    def flat(self, values_NT: torch.Tensor, real_NT: torch.Tensor) -> torch.Tensor:
        """As the record has them: with padding, or without."""
        return values_NT.flatten(0, 1) if self.setting.padded else values_NT[real_NT]

    def note(
        self, rank: int, micro: int, rows: list[Row], batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> None:
        ids, mask, real = batch
        lengths = [ids.shape[1]] * len(rows) if self.setting.padded else [len(row.ids) for row in rows]
        self.put(
            rank,
            lengths=torch.tensor(lengths),
            rows=torch.tensor([row.number for row in rows]),
            micro_batches=torch.full((len(rows),), micro),
            token_ids=self.flat(ids, real),
            data_mask=self.flat(mask, real),
            is_real=self.flat(real, real),
        )

    def loss_mask(self, mask: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The trainer's own mask, [N, T]."""
        found = mask.clone()
        if self.fault == "mask one late":
            found = functional.pad(mask, (1, 0))[:, :-1] & real
        elif self.fault == "prompt trained":
            found = real.clone()
        elif self.fault == "first answer token lost":
            found = mask & functional.pad(mask, (1, 0))[:, :-1]
        elif self.fault == "last turn alone":
            turn = (mask & ~functional.pad(mask, (1, 0))[:, :-1]).cumsum(1)
            found = mask & (turn == turn.amax(1, keepdim=True))
        elif self.fault == "all masked":
            found = torch.zeros_like(mask)
        found[:, 0] = False
        return found

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        if self.fault == "temperature left out":
            temperature = 1.0
        elif self.fault == "temperature multiplies":
            temperature = 1.0 / temperature
        elif self.fault == "logits of the own place":
            logits = functional.pad(logits, (0, 0, 0, 1))[:, 1:]
        return functional.log_softmax(logits / temperature, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def reduced(
        self, losses: list[list[torch.Tensor]], masks: list[list[torch.Tensor]], per: str = "token"
    ) -> torch.Tensor:
        """From [N, T] losses of every rank and micro-batch to the step's."""
        fault, ranks = self.fault, len(losses)
        pairs = [
            (rank, loss, mask.float())
            for rank in range(ranks)
            for loss, mask in zip(losses[rank], masks[rank], strict=True)
        ]
        total = sum((loss * mask).sum() for _, loss, mask in pairs)
        count = sum(mask.sum() for _, _, mask in pairs)
        micro = [(loss * mask).sum() / mask.sum() for _, loss, mask in pairs]
        by_row = [(loss * mask).sum(-1) / mask.sum(-1).clamp(min=1) for _, loss, mask in pairs]
        rows = torch.cat(by_row)
        if fault != "empty rows counted":
            rows = rows[torch.cat([mask.any(-1) for _, _, mask in pairs])]
        if fault == "mean of micro-batches":
            return torch.stack(micro).mean()
        if fault == "sum of means":
            return torch.stack(micro).sum() / ranks
        if fault == "local denominators":
            own = [[(loss, mask) for at, loss, mask in pairs if at == rank] for rank in range(ranks)]
            return torch.stack(
                [sum((x * m).sum() for x, m in one) / sum(m.sum() for _, m in one) for one in own]
            ).mean()
        if fault == "mean of rows":
            return rows.mean()
        if fault == "first labels counted":
            return total / (count + len(rows))
        if fault == "not divided by accumulation":
            return total / count * (len(pairs) / ranks)
        if fault == "divided by ranks twice":
            return total / count / ranks
        if fault == "sum":
            return total
        if fault == "last micro-batch alone":
            return micro[-1]
        if per == "sequence" and fault != "token mean":
            return rows.mean()
        return total / count

    # --- steps

    def sft(self) -> StepRecord:
        temperature = 0.7
        self.settings = {"reduction": "token mean", "temperature": temperature, "accumulation_steps": 5}
        rows = [self.row(number) for number in range(10)]
        losses: list[list[torch.Tensor]] = [[] for _ in range(self.setting.ranks)]
        masks: list[list[torch.Tensor]] = [[] for _ in range(self.setting.ranks)]
        for rank, parts in enumerate(self.split(rows)):
            for micro, part in enumerate(parts):
                batch = ids, mask, real = self.batch(part)
                self.note(rank, micro, part, batch)
                logits = self.model(ids)
                logprobs, own = self.logprobs(logits, ids, temperature), self.loss_mask(mask, real)
                token_losses = -logprobs
                if self.fault == "sign of the token losses":
                    token_losses = logprobs
                losses[rank].append(token_losses)
                masks[rank].append(own)
                self.put(
                    rank,
                    logits=self.flat(logits, real),
                    logprobs=self.flat(logprobs, real),
                    loss_mask=self.flat(own, real),
                    token_losses=self.flat(token_losses * own, real),
                )
        if self.fault == "all masked":
            loss = torch.zeros((), requires_grad=True) * sum(part.sum() for each in losses for part in each)
        else:
            loss = self.reduced(losses, masks)
        count = sum(int(mask.sum()) for each in masks for mask in each)
        if self.fault == "first labels counted":
            count += len(rows)
        elif self.fault == "local denominators":
            count = sum(int(mask.sum()) for mask in masks[0])
        self.figures |= {"loss": float(loss.detach()), "denominator": float(count)}
        if self.fault in ("mean of micro-batches", "sum of means", "mean of rows", "sum"):
            del self.figures["denominator"]
        self.optimizer_step(loss)
        return self.record("sft")

    def pair_rows(self) -> list[tuple[Row, Row]]:
        found = []
        for number in range(10):
            prompt = self.ids(self.number(2, 5))
            found.append((self.row(number, 1, prompt), self.row(number, 1, prompt)))
        return found

    def dpo(self, more: dict[str, Any] | None = None) -> StepRecord:
        beta, loss_name = 0.3, self.setting.options.get("loss", "sigmoid")
        self.settings = {"beta": beta, "preference_loss": loss_name, **(more or {})}
        if "preference_terms" in self.settings:
            del self.settings["preference_loss"]
        pairs = self.pair_rows()
        losses: list[list[torch.Tensor]] = [[] for _ in range(self.setting.ranks)]
        for rank, parts in enumerate(self.split(pairs)):
            begin = 0
            for micro, part in enumerate(parts):
                rows = [row for pair in part for row in pair]
                batch = ids, mask, real = self.batch(rows)
                self.note(rank, micro, rows, batch)
                own = self.loss_mask(mask, real)
                logprobs = self.logprobs(self.model(ids), ids, 1.0)
                counted = real if self.fault == "prompt in the sums" else own
                sums = (logprobs * counted)[:, 1:].sum(1)
                if self.fault == "mean in place of sums":
                    sums = sums / own.sum(1)
                with torch.no_grad():
                    ref = (self.logprobs(self.reference(ids), ids, 1.0) * own).sum(1)
                loss = self.pair_loss(sums, ref, own.sum(1), beta=beta, loss=loss_name)
                losses[rank].append(loss)
                places = torch.arange(len(part)) * 2 + begin
                self.put(
                    rank,
                    logprobs=self.flat(logprobs.detach(), real),
                    loss_mask=self.flat(own, real),
                    logprob_sums=sums.detach(),
                    ref_logprob_sums=ref,
                    chosen=places,
                    rejected=places + 1,
                    pair_losses=loss.detach(),
                )
                begin += len(rows)
        return self.finish_pairs("dpo", losses)

    def pair_loss(
        self, sums: torch.Tensor, ref: torch.Tensor, tokens: torch.Tensor, *, beta: float, loss: str
    ) -> torch.Tensor:
        ratios = sums - ref
        if self.fault == "reference left out":
            ratios = sums
        elif self.fault == "reference added":
            ratios = sums + ref
        if (loss == "ipo") != (self.fault == "other averaging"):
            ratios = ratios / tokens
        margin = ratios[0::2] - ratios[1::2]
        if self.fault == "pairs swapped":
            margin = -margin
        if self.fault == "beta left out":
            beta = 1.0
        if loss == "ipo" or self.fault == "ipo for sigmoid":
            return (margin - 1 / (2 * beta)).square()
        return -functional.logsigmoid(beta * margin)

    def finish_pairs(self, objective: str, losses: list[list[torch.Tensor]]) -> StepRecord:
        columns = [[loss.unsqueeze(1) for loss in own] for own in losses]
        loss = self.reduced(columns, [[torch.ones_like(each) for each in own] for own in columns])
        self.figures |= {
            "loss": float(loss.detach()),
            "denominator": float(sum(len(each) for own in losses for each in own)),
        }
        self.optimizer_step(loss)
        return self.record(objective)

    def reward(self) -> StepRecord:
        self.settings = {"margin_scale": 1.0, "label_smoothing": 0.1}
        losses: list[list[torch.Tensor]] = [[] for _ in range(self.setting.ranks)]
        head = self.model.head.weight[0].float()
        for rank, parts in enumerate(self.split(self.pair_rows())):
            begin = 0
            for micro, part in enumerate(parts):
                rows = [row for pair in part for row in pair]
                batch = ids, _, real = self.batch(rows)
                self.note(rank, micro, rows, batch)
                scores = torch.stack([self.model.embed(row.ids).float().mean(0) @ head for row in rows])
                margins = self.floats(len(part)).abs()
                gap = scores[0::2] - scores[1::2]
                if self.fault == "pairs swapped":
                    gap = -gap
                used = torch.zeros_like(margins) if self.fault == "margin left out" else margins
                used = -margins if self.fault == "margin added" else used
                smoothing = 0.0 if self.fault == "smoothing left out" else 0.1
                h = gap - used
                loss = -(1 - smoothing) * functional.logsigmoid(h) - smoothing * functional.logsigmoid(-h)
                losses[rank].append(loss)
                places = torch.arange(len(part)) * 2 + begin
                self.put(
                    rank, scores=scores.detach(), margins=margins, chosen=places, rejected=places + 1,
                    pair_losses=loss.detach(),
                )  # fmt: skip
                begin += len(rows)
        return self.finish_pairs("reward", losses)

    def optimizer_step(self, loss: torch.Tensor) -> None:
        """Clip, schedule, AdamW, with a history."""
        model = self.model.float() if self.setting.dtype == torch.float32 else None
        if model is None:
            return  # weights in bf16 are no master weights: nothing to judge
        most, peak, total, step = 0.5, 3e-3, 10, 4
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        gradients = [
            torch.zeros_like(w) if g is None else g for w, g in zip(model.parameters(), gradients, strict=True)
        ]
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        factor = min(1.0, most / float(norm)) if float(norm) else 1.0
        clipped = [each * factor for each in gradients]
        if self.fault == "each parameter clipped":
            clipped = [each * min(1.0, most / max(float(each.norm()), 1e-9)) for each in gradients]
        noted = float(norm)
        if self.fault == "norm after clipping":
            noted = float(torch.cat([each.flatten() for each in clipped]).norm())
        elif self.fault == "sum of norms":
            noted = sum(float(each.norm()) for each in gradients)
        done = step - 1 - (1 if self.fault == "rate one step late" else 0)
        rate = peak * (1 - (done - 2) / (total - 2)) if done >= 2 else peak * done / 2
        decayed, plain = [], []
        for weight, gradient in zip(model.parameters(), clipped, strict=True):
            weight.grad = gradient.clone()
            (decayed if weight.ndim >= 2 else plain).append(weight)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        rule = torch.optim.Adam if self.fault == "L2" else torch.optim.AdamW
        own_rate = peak if self.fault == "peak rate in the update" else rate
        optimizer = rule([group for group in groups if group["params"]], lr=own_rate, betas=(0.9, 0.95), eps=1e-8)
        history = {}
        for name, weight in model.named_parameters():
            first, root = (self.floats(weight.numel(), 1e-2).view_as(weight) for _ in range(2))
            history[name] = (first, root.square() + 1e-6)
        updates = 3 + (1 if self.fault == "bias correction ahead" else 0)
        for name, weight in model.named_parameters():
            first, second = history[name]
            optimizer.state[weight] = {
                "step": torch.tensor(float(updates)),
                "exp_avg": first.clone(),
                "exp_avg_sq": second.clone(),
            }
        optimizer.step()
        for (name, weight), gradient, given in zip(model.named_parameters(), gradients, clipped, strict=True):
            found = {"gradients": gradient, "clipped_gradients": given, "weights_before": before[name],
                     "weights_after": weight,
                     "exp_avg": history[name][0], "exp_avg_sq": history[name][1]}  # fmt: skip
            self.state |= {f"{kind}.{name}": value.detach().numpy().copy() for kind, value in found.items()}
        self.figures |= {"grad_norm": noted, "learning_rate": rate}
        self.settings |= {
            "max_grad_norm": most, "beta1": 0.9, "beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.1,
            "updates_before": 3, "schedule": "linear", "peak_learning_rate": peak, "warmup_steps": 2,
            "total_steps": total,
        }  # fmt: skip

    def record(self, objective: str) -> StepRecord:
        ranks = [
            {name: torch.cat(parts).detach().numpy() for name, parts in tensors.items()} for tensors in self.tensors
        ]
        head = RecordHead(objective, 4, self.setting.ranks, self.settings, self.figures, {"name": "plain"})
        return StepRecord(head, ranks, self.state)


def step_of(objective: str, setting: Setting) -> StepRecord:
    """The record of one step."""
    from threestep.plugins.audit.tests.plain_llama import PlainLlama
    from threestep.plugins.audit.tests.plain_policy_trainer import POLICY_OBJECTIVES, PlainPolicyTrainer
    from threestep.plugins.audit.tests.plain_preferences import PlainPreferences

    if objective in POLICY_OBJECTIVES:
        return PlainPolicyTrainer(setting, objective).policy()
    if objective in ("pairs", "marked"):
        return getattr(PlainPreferences(setting), objective)()
    if objective == "llama":
        return PlainLlama(setting).llama()
    return getattr(PlainTrainer(setting), objective)()


# objective, fault, wrong quantity, words of its cause
FAULTS = (
    ("sft", "mask one late", "loss_mask", "one token late"),
    ("sft", "prompt trained", "loss_mask", "the prompt carries loss"),
    ("sft", "first answer token lost", "loss_mask", "first token of each response"),
    ("sft", "last turn alone", "loss_mask", "only the last response"),
    ("sft", "all masked", "loss_mask", "no token carries loss"),
    ("sft", "temperature left out", "logprobs", "temperature is left out"),
    ("sft", "temperature multiplies", "logprobs", "multiplied by the temperature"),
    ("sft", "logits of the own place", "logprobs", "logits of its own place"),
    ("sft", "sign of the token losses", "token_losses", "sign"),
    ("sft", "sum of means", "loss", "sum over micro-batches"),
    ("sft", "mean of rows", "loss", "mean over sequences"),
    ("sft", "first labels counted", "denominator", "one token more for each sequence"),
    ("sft", "not divided by accumulation", "loss", "not divided by the number of micro-batches"),
    ("sft", "divided by ranks twice", "loss", "number of ranks once more"),
    ("sft", "sum", "loss", "divided by nothing"),
    ("sft", "last micro-batch alone", "loss", "last micro-batch alone"),
    ("sft", "each parameter clipped", "clipped_gradients", "by its own norm"),
    ("sft", "norm after clipping", "grad_norm", "after clipping"),
    ("sft", "sum of norms", "grad_norm", "sum of the parameters' norms"),
    ("sft", "rate one step late", "learning_rate", "one step late"),
    ("sft", "L2", "weights_after", "L2"),
    ("sft", "bias correction ahead", "weights_after", "one update ahead"),
    ("dpo", "prompt in the sums", "logprob_sums", "prompt is counted"),
    ("dpo", "mean in place of sums", "logprob_sums", "mean over a response"),
    ("dpo", "reference left out", "pair_losses", "reference is left out"),
    ("dpo", "reference added", "pair_losses", "reference is added"),
    ("dpo", "pairs swapped", "pair_losses", "swapped"),
    ("dpo", "beta left out", "pair_losses", "beta is left out"),
    ("dpo", "other averaging", "pair_losses", "means over tokens"),
    ("dpo", "ipo for sigmoid", "pair_losses", "IPO"),
    ("dpo", "not divided by accumulation", "loss", "not divided by the number of micro-batches"),
    ("dpo", "mean of micro-batches", "loss", "mean over micro-batches"),
    ("reward", "pairs swapped", "pair_losses", "swapped"),
    ("reward", "margin left out", "pair_losses", "margin is left out"),
    ("reward", "margin added", "pair_losses", "margin is added"),
    ("reward", "smoothing left out", "pair_losses", "smoothing is left out"),
    ("reward", "sum", "loss", "divided by nothing"),
)
