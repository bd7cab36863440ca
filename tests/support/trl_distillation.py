"""Divergences and their gradients beside the loss of TRL 1.16's GKD trainer, on the same logits.

python -m tests.support.trl_distillation     (with trl 1.16 installed)
"""

from __future__ import annotations

from typing import Any

import torch

from threestep.plugins.distillation.divergence import divergence
from threestep.plugins.distillation.settings import DivergenceSettings

# TRL's beta: ours.
SETTINGS = {
    0.0: DivergenceSettings("forward"),
    1.0: DivergenceSettings("reverse"),
    0.1: DivergenceSettings("js", 0.1),
    0.5: DivergenceSettings("js", 0.5),
    0.9: DivergenceSettings("js", 0.9),
}
TOKENS, VOCABULARY, TEMPERATURE = 40, 1000, 0.9


def main(say: Any) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    for beta, settings in SETTINGS.items():
        worst = [0.0, 0.0]
        for seed in range(3):
            dice = torch.Generator().manual_seed(seed)
            student, teacher = (3.0 * torch.randn(1, TOKENS, VOCABULARY, generator=dice) for _ in range(2))
            labels = torch.where(torch.rand(1, TOKENS, generator=dice) < 0.3, -100, 0)
            theirs, ours = (student.clone().requires_grad_() for _ in range(2))
            loss = GKDTrainer.generalized_jsd_loss(theirs, teacher, labels, beta, TEMPERATURE)
            logprobs = (torch.log_softmax(each / TEMPERATURE, dim=-1) for each in (ours, teacher))
            mean = divergence(*logprobs, settings)[labels != -100].mean()
            gradients = [torch.autograd.grad(*each)[0] for each in ((loss, theirs), (mean, ours))]
            difference = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
            worst[0] = max(worst[0], abs(float(((loss - mean) / loss).detach())))
            worst[1] = max(worst[1], float(difference))
        say(f"beta {beta:g}, {settings.kind}: loss {worst[0]:.1e}, gradient {worst[1]:.1e} of the largest")
        assert max(worst) < 1e-5


if __name__ == "__main__":
    main(print)  # noqa: T201
