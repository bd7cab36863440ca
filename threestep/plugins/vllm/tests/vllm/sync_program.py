"""Trains tiny models and, after every update, compares vLLM's log-probabilities with the training forward's.

    python threestep/plugins/vllm/tests/vllm/sync_program.py MODEL_FOLDER UPDATES [SERVERS CASES]

test_rollout.py runs it on one and two ranks, and test_servers.py with servers. It reports, for each case, the largest
difference and what else is looked at.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.lora_settings import lora_settings

BUCKET_ELEMENTS = 3000
CASES = {
    f"zero{stage}{'_lora' if lora else ''}": {"zero_stage": stage, "lora_dim": lora}
    for stage in (0, 2, 3)
    for lora in (0, 4)
}

# Adapters go to servers by themselves, but for these.
SERVER_CASES = {**CASES, **{f"zero{stage}_merged": {"zero_stage": stage, "lora_dim": 4} for stage in (0, 3)}}


def main(folder: Path, updates: int, servers: str = "", cases: str = "") -> None:
    from tests.distributed.launch import report
    from threestep.plugins.vllm.tests.vllm.conftest import started
    from training.utils.engine import zero3
    from training.utils.engine.ranks.startup import started_process_group

    zero3.GATHER_ELEMENTS = BUCKET_ELEMENTS
    with started_process_group() as ranks:
        rollout_engine = served(servers) if servers else started()
        chosen = {name: SERVER_CASES[name] for name in cases.split(",")} if cases else CASES
        reports = {}
        for name, case in chosen.items():
            if servers:
                rollout_engine._lora = "merged" if name.endswith("_merged") else None
            reports[name] = run_case(rollout_engine, folder, updates, ranks, **case)
        report(reports)


def served(servers: str) -> Any:
    from threestep.plugins.vllm.servers.arguments import VllmServerArguments
    from threestep.plugins.vllm.servers.engine import VllmServerRollout

    engine = VllmServerRollout(None, VllmServerArguments(servers, 300.0), 64)
    engine.check(None, None)  # type: ignore[arg-type]
    return engine


def run_case(
    rollout_engine: Any, folder: Path, updates: int, ranks: Any, zero_stage: int, lora_dim: int
) -> dict[str, Any]:
    from tests.support.tiny_models import VOCABULARY
    from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts
    from training.utils.contracts.rollout_engine import RolloutRequest
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.engine.whole_model import WholeModel
    from training.utils.loading.models import load_causal_lm
    from training.utils.models.token_model import PolicyModel
    from training.utils.setup.setup import load_under

    torch.manual_seed(0)
    settings = EngineSettings(dtype="fp32", zero_stage=zero_stage, learning_rate=1e-2, lr_scheduler_type="constant")
    model_settings = lora_settings(str(folder), lora_dim=lora_dim, lora_alpha=16.0)
    model = load_under(settings, ranks, lambda dtype: load_causal_lm(model_settings, dtype, VOCABULARY))
    engine = TrainingEngine(PolicyModel(model), settings, ranks, updates)
    actor = WholeModel(engine, model)
    if hasattr(rollout_engine, "_vllm"):
        rollout_engine._vllm.updates = None  # the weights of the case before
    else:
        rollout_engine._run += "x"
        rollout_engine.figures()
    ids_BP, mask_BP = prompts((3, 5, 2, 7), seed=ranks.rank)
    worst, moved = 0.0, 0.0
    sent = Sent(actor)
    for update in range(updates):
        with rollout_engine.lent(sent) as lent:
            seeds = range(update * 4, update * 4 + 4)
            rollout = rollout_engine.roll_out(lent, RolloutRequest(ids_BP, mask_BP, PLAIN, seeds))
        engine.eval()
        with torch.no_grad():
            logprobs_M = engine(rows_of(rollout)).logprobs_M
        sampled_M = rollout.sampled_logprobs_BR[rollout.response_mask_BR]
        worst = max(worst, float((logprobs_M - sampled_M).abs().max()))
        # The loss pushes away from what was drawn: the same tokens get less likely with each update.
        engine.train()
        engine.backward(engine(rows_of(rollout)).logprobs_M.sum() / 100.0)
        engine.step()
        engine.eval()
        with torch.no_grad():
            after_M = engine(rows_of(rollout)).logprobs_M
        moved = max(moved, float((after_M - logprobs_M).abs().mean()))
    before = sent.asked
    for _ in range(2):  # the second time nothing has changed
        with rollout_engine.lent(sent) as lent:
            rollout_engine.roll_out(lent, RolloutRequest(ids_BP, mask_BP, PLAIN, range(4)))
    return {
        "worst": worst,
        "moved": moved,
        "sent": before,
        "megabytes": rollout_engine.figures().get("rollout/weight_megabytes_sent"),
        "sent_again": sent.asked - before,
        "most_gathered": sent.most_gathered,
        "largest_weight": max(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters()),
    }


class Sent:
    """A WholeModel that counts how often its weights were asked for, and the most numbers that were gathered at one
    time under ZeRO-3."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.asked = 0
        self.most_gathered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def send_parts(self, take: Any, with_base: bool) -> None:
        self.asked += 1
        self._actor.send_parts(take, with_base)

    def send(self, take: Any) -> None:
        tensors = self.tensors()
        if self._actor.engine.ranks.is_main:
            take(tensors)
        for _ in tensors:
            pass

    def tensors(self) -> Any:
        self.asked += 1
        for name, tensor in self._actor.tensors():
            if self._actor.is_sharded:
                gathered = sum(weight.numel() for weight in self._actor.model.parameters())
                self.most_gathered = max(self.most_gathered, gathered)
            yield name, tensor


def rows_of(rollout: Any) -> Any:
    from tests.unit.utils.generation.decoding.test_hf import PAD
    from training.utils.layout.rows import padded_rows

    return padded_rows(rollout.sequences(), PAD)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
