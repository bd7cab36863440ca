"""The plain trainer's steps on the newer losses of pairs, and on marked responses, with one fault planted.

In float32; it shares no code with the judge's references.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from tests.support.plain_losses import Sums, comparison, pair_loss
from threestep.plugins.audit.recording.files import StepRecord
from threestep.plugins.audit.tests.plain_trainer import PlainTrainer

SETTINGS: dict[str, dict[str, Any]] = {
    "robust": {"label_smoothing": 0.2},
    "simpo": {"simpo_gamma": 0.6},
    "cpo": {"cpo_alpha": 0.7},
    "sum": {"preference_terms": "sigmoid:0.8,sft:0.2"},
    "kto": {"desirable_weight": 1.2, "undesirable_weight": 0.8},
}
NAMES = ("robust", "hinge", "sigmoid_norm", "apo_zero", "apo_down", "simpo", "cpo", "orpo", "sum")


class PlainPreferences(PlainTrainer):
    """options: `loss`, one of NAMES, or kto or bco."""

    def pairs(self) -> StepRecord:
        self.setting.options.setdefault("loss", "simpo")
        own = SETTINGS.get(self.setting.options["loss"], {})
        return self.dpo(own)

    def pair_loss(
        self, sums: torch.Tensor, ref: torch.Tensor, tokens: torch.Tensor, *, beta: float, loss: str
    ) -> torch.Tensor:
        fault = self.fault
        constants = {"beta": beta, **{name: self.settings.get(name, 0.0) for name in ("simpo_gamma", "cpo_alpha")}}
        constants["label_smoothing"] = 0.0 if fault == "no smoothing" else self.settings.get("label_smoothing", 0.0)
        left_out = {"gamma left out": "simpo_gamma", "likelihood left out": "cpo_alpha"}.get(fault)
        if left_out:
            constants[left_out] = 0.0
        if fault == "apo_zero for apo_down":
            loss = "apo_zero"
        if fault == "swapped pairs":
            sums, ref, tokens = (each.view(-1, 2).flip(1).flatten() for each in (sums, ref, tokens))
        counts = torch.ones_like(tokens) if fault == "sums for means" else tokens
        own = Sums(sums, sums, ref, counts, constants)
        if fault == "token mean of the likelihood":
            return comparison(loss, own) - sums[0::2].sum() / tokens[0::2].sum()
        return (
            comparison("sigmoid", own) + pair_loss("sft", own) if fault == "weights left out" else pair_loss(loss, own)
        )

    def marked(self) -> StepRecord:
        """KTO or BCO: every response alone."""
        name, beta, fault = self.setting.options.get("loss", "kto"), 0.3, self.fault
        self.settings = {"beta": beta, "preference_loss": name, **SETTINGS["kto"]}
        rows = [self.row(number, 1) for number in range(10)]
        parts = self.split(rows)
        ratios: list[list[torch.Tensor]] = []
        goods: list[list[torch.Tensor]] = []
        others: list[list[torch.Tensor]] = []
        for rank, own in enumerate(parts):
            ratios, goods, others = [*ratios, []], [*goods, []], [*others, []]
            for micro, part in enumerate(own):
                batch = ids, mask, real = self.batch(part)
                self.note(rank, micro, part, batch)
                logprobs = self.logprobs(self.model(ids), ids, 1.0)
                sums = (logprobs * mask).sum(1)
                with torch.no_grad():
                    ref = (self.logprobs(self.reference(ids), ids, 1.0) * mask).sum(1)
                good = torch.tensor([row.number % 3 > 0 for row in part])
                mismatched = 3.0 * self.floats(len(part)) + 0.5
                self.put(
                    rank, logprobs=self.flat(logprobs.detach(), real), loss_mask=self.flat(mask, real),
                    logprob_sums=sums.detach(), ref_logprob_sums=ref, is_good=good, mismatched_ratios=mismatched,
                )  # fmt: skip
                ratios[rank].append(sums - ref)
                goods[rank].append(good)
                others[rank].append(mismatched)
        point = self.point(name, ratios, goods, others)
        self.figures["reference_point"] = point
        weights = (1.0, 1.0) if fault == "marks weigh alike" else (1.2, 0.8)
        if fault == "no point":
            point = 0.0
        losses = []
        for rank in range(len(parts)):
            losses.append([])
            for ratio, mark in zip(ratios[rank], goods[rank], strict=True):
                sign = torch.where(mark != (fault == "marks swapped"), 1.0, -1.0)
                gain = sign * beta * (ratio - point)
                kto = torch.where(sign > 0, *weights) * (1 - torch.sigmoid(gain))
                losses[rank].append(kto if name == "kto" else -logsigmoid(gain))
        return self.finish_pairs("dpo", losses)

    def point(self, name: str, ratios: Any, goods: Any, others: Any) -> float:
        whole, fault = torch.cat([each for own in others for each in own]), self.fault
        if name == "bco":
            own, good = (torch.cat([each for part in parts for each in part]).detach() for parts in (ratios, goods))
            return float((own[good].mean() + own[~good].mean()) / 2)
        if fault == "point of micro-batches":
            return float(torch.stack([each.mean().clamp(min=0) for own in others for each in own]).mean())
        if fault == "point of the first rank":
            return max(0.0, float(torch.cat(others[0]).mean()))
        if fault == "point of own responses":
            return max(0.0, float(torch.cat([each for own in ratios for each in own]).detach().mean()))
        return max(0.0, float(whole.mean()))


# Options that a fault needs to show.
PREFERENCE_OPTIONS = {
    "gamma left out": {"loss": "simpo"},
    "sums for means": {"loss": "simpo"},
    "likelihood left out": {"loss": "cpo"},
    "token mean of the likelihood": {"loss": "orpo"},
    "apo_zero for apo_down": {"loss": "apo_down"},
    "no smoothing": {"loss": "robust"},
    "weights left out": {"loss": "sum"},
    "swapped pairs": {"loss": "hinge"},
}
# As `plain_trainer.FAULTS`.
PREFERENCE_FAULTS = (
    ("pairs", "gamma left out", "pair_losses", "gamma is left out"),
    ("pairs", "sums for means", "pair_losses", "sums over tokens"),
    ("pairs", "likelihood left out", "pair_losses", "likelihood is left out"),
    ("pairs", "apo_zero for apo_down", "pair_losses", "the loss is apo_zero"),
    ("pairs", "no smoothing", "pair_losses", "smoothing is left out"),
    ("pairs", "weights left out", "pair_losses", "weights of the terms"),
    ("pairs", "swapped pairs", "pair_losses", "swapped"),
    ("marked", "point of micro-batches", "reference_point", "each micro-batch"),
    ("marked", "point of the first rank", "reference_point", "first rank alone"),
    ("marked", "point of own responses", "reference_point", "own responses"),
    ("marked", "no point", "loss", "reference point is left out"),
    ("marked", "marks swapped", "loss", "swapped"),
    ("marked", "marks weigh alike", "loss", "weigh alike"),
)
