"""Losses on pairs beside the lines of TRL 1.16's trainers, on the same log-probabilities of tokens.

python -m tests.support.trl_losses     (with trl 1.16 installed)
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.objectives import objective
from training.step2_dpo.losses.pairs import Responses, log_ratios, preference_loss

# Our name: TRL's, beta, the flags of ours, and what TRL calls them.
DPO: dict[str, tuple[str, float, dict[str, float]]] = {
    "sigmoid": ("sigmoid", 0.3, {}),
    "sigmoid_norm": ("sigmoid_norm", 0.7, {}),
    "robust": ("robust", 0.3, {"label_smoothing": 0.2}),
    "ipo": ("ipo", 0.3, {}),
    "hinge": ("hinge", 0.05, {}),
    "apo_zero": ("apo_zero", 0.3, {}),
    "apo_down": ("apo_down", 0.3, {}),
}
FREE = {
    "simpo": (2.0, {"label_smoothing": 0.1}),
    "cpo": (0.3, {"label_smoothing": 0.1, "cpo_alpha": 0.0}),
    "orpo": (0.4, {}),
}
PAIRS, MOST_TOKENS = 6, 9


def main(say: Any) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.trainer import dpo_trainer

    begin, end = (
        "        # Get the log ratios for the chosen and rejected responses",
        "        if self.aux_loss_enabled:\n            aux_loss",
    )
    source = inspect.getsource(dpo_trainer.DPOTrainer._compute_loss)
    lines = compile(textwrap.dedent(source[source.index(begin) : source.index(end)]), "trl", "exec")
    for seed in range(3):
        drawn = Drawn(seed)
        for name, (theirs, beta, own) in DPO.items():
            responses, leaves = drawn.responses(name, beta, own)
            trainer = SimpleNamespace(
                f_divergence_type="reverse_kl", loss_types=[theirs], loss_weights=[1.0], beta=beta, use_weighting=False,
                label_smoothing=own.get("label_smoothing", 0.0),
            )  # fmt: skip
            logps, ref = ([row.sum() for row in rows] for rows in (leaves, drawn.reference))
            mask = torch.zeros(2 * PAIRS, MOST_TOKENS)
            for row, tokens in enumerate([*leaves[::2], *leaves[1::2]]):
                mask[row, : len(tokens)] = 1.0
            values = vars(dpo_trainer) | {"self": trainer, "completion_mask": mask, "device": "cpu"}
            for side, start in (("chosen", 0), ("rejected", 1)):
                values |= {f"{side}_logps": torch.stack(logps[start::2])}
                values |= {f"ref_{side}_logps": torch.stack(ref[start::2])}
            exec(lines, values)  # TRL's own text
            say(
                seed, name, *compared(preference_loss(responses[0], float(PAIRS), responses[1]), values["loss"], leaves)
            )
        for name, (beta, own) in FREE.items():
            responses, leaves = drawn.responses(name, beta, own)
            sums = torch.stack([row.sum() if name == "cpo" else row.mean() for row in leaves])
            if name == "orpo":
                trainer = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
                odds = ORPOTrainer.odds_ratio_loss(trainer, sums[::2], sums[1::2])[0]
                wanted = -odds.mean() - sums[::2].mean()
            else:
                cpu, loss_type = SimpleNamespace(device="cpu"), "simpo" if name == "simpo" else "sigmoid"
                own = {"alpha": 0.0, "beta": beta, "label_smoothing": 0.1, "simpo_gamma": 0.5}
                trainer = SimpleNamespace(accelerator=cpu, loss_type=loss_type, **own)
                wanted = CPOTrainer.cpo_loss(trainer, sums[::2], sums[1::2])[0].mean()
            say(seed, name, *compared(preference_loss(responses[0], float(PAIRS), responses[1]), wanted, leaves))


def of_marks(say: Any) -> None:
    """KTO, with the same estimate of the KL divergence."""
    from trl.trainer import kto_trainer

    source = inspect.getsource(kto_trainer.KTOTrainer)
    begin, end = source.index("        # Chosen losses\n"), source.index('        self._metrics[mode]["kl"]')
    lines = compile(textwrap.dedent(source[begin:end]), "trl", "exec")
    how = objective("kto", 0.3, desirable_weight=1.2, undesirable_weight=0.9)
    for seed, z in enumerate((0.0, 0.4, 1.7)):
        drawn = Drawn(seed)
        leaves = [row.clone().requires_grad_() for row in drawn.policy]
        logprobs_B, reference_B = (torch.stack([row.sum() for row in rows]) for rows in (leaves, drawn.reference))
        is_good_B = torch.arange(2 * PAIRS) % 3 != 1
        weights = {"desirable_weight": 1.2, "undesirable_weight": 0.9}
        trainer = SimpleNamespace(loss_type="kto", beta=0.3, **weights)
        values = vars(kto_trainer) | {"self": trainer, "kl": torch.tensor(z, dtype=torch.float64)}
        for side, mask in (("chosen", is_good_B), ("rejected", ~is_good_B)):
            values |= {f"{side}_logps": logprobs_B[mask], f"ref_{side}_logps": reference_B[mask]}
        exec(lines, values)  # TRL's own text
        none, columns = torch.zeros(0, dtype=torch.int64), {"is_good": is_good_B.double()}
        ratios_B = logprobs_B - reference_B
        read = Responses(ratios_B, logprobs_B, ratios_B, none, none, none, none, columns, reference_point=z)
        say(seed, "kto", *compared(preference_loss(read, 2.0 * PAIRS, how), values["losses"].nanmean(), leaves))


class Drawn:
    """Pairs of responses of different lengths, in float64."""

    def __init__(self, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, MOST_TOKENS + 1, (2 * PAIRS,), generator=dice).tolist()
        policy, reference = (
            [-3 * torch.rand(n, generator=dice, dtype=torch.float64) - 0.01 for n in lengths] for _ in range(2)
        )
        self.policy, self.reference = policy, reference

    def responses(self, name: str, beta: float, own: dict[str, float]) -> tuple[Any, list[torch.Tensor]]:
        """((the responses, the objective), the policy's tokens, which ask for gradients)."""
        how = objective(name, beta, **own)
        leaves = [row.clone().requires_grad_() for row in self.policy]
        logprobs_B, reference_B = (torch.stack([row.sum() for row in rows]) for rows in (leaves, self.reference))
        tokens_B = torch.tensor([float(len(row)) for row in leaves], dtype=torch.float64)
        then_B = reference_B if how.loss.needs_reference else torch.zeros_like(reference_B)
        ratios_B = log_ratios(logprobs_B, then_B, tokens_B, how.loss)
        better_Q = torch.arange(0, 2 * PAIRS, 2)
        weight_Q = torch.ones(PAIRS, dtype=torch.float64)
        is_best_B = torch.arange(2 * PAIRS) % 2 == 0
        return (Responses(ratios_B, logprobs_B, tokens_B, better_Q, better_Q + 1, weight_Q, is_best_B), how), leaves


def compared(ours: torch.Tensor, theirs: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[float, float, float]:
    """(Our loss, how far theirs is from it, how far the gradient of a token is at most.)"""
    one, other = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs))
    most = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    return float(ours), abs(float(ours - theirs)), most


def show(seed: int, name: str, loss: float, off: float, slope: float) -> None:
    sys.stdout.write(f"{seed} {name:13} {loss:10.6f} {off:.1e} {slope:.1e}\n")


if __name__ == "__main__":
    main(show)
    of_marks(show)
