"""The recorders on stand-ins for other trainers; threestep/plugins/audit/tests/end_to_end/test_other_trainers.py has
the real ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import threestep.audit
from threestep.plugins.audit.judge import AGREES, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.text import verdict
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit

IDS = torch.tensor([[5, 6, 7, 1], [8, 9, 0, 0]])
REAL = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logprobs = self.head(self.embed(input_ids[:, :-1])).log_softmax(-1)
        mask = labels[:, 1:] != -100
        taken = logprobs.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return SimpleNamespace(log_probs=taken * mask, label_mask=mask)


class Stand:
    """A trainer's parts, as transformers has them."""

    def __init__(self, **args: Any) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)
        self.state = SimpleNamespace(global_step=0, max_steps=2)
        self.accelerator = SimpleNamespace(
            process_index=0, num_processes=1, is_main_process=True, device="cpu", gather=lambda value: value,
            backward=lambda loss: loss.backward(),
        )  # fmt: skip
        common = {
            "max_grad_norm": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
            "lr_scheduler_type": "constant", "learning_rate": 1e-2, "gradient_accumulation_steps": 2,
            "get_warmup_steps": lambda total: 0,
        }  # fmt: skip
        self.args = SimpleNamespace(**common, **args)
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks.remove(callback)

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        self.accelerator.backward(loss)
        return loss.detach()

    def train(self, batches: list[Any], items: Any = None) -> None:
        self.step(batches, items)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def step(self, batches: list[Any], items: Any = None) -> None:
        for batch in batches:
            self.training_step(self.model, dict(batch), items)
        self._clip_grad_norm(self.model)
        for callback in self.callbacks:
            callback.on_pre_optimizer_step(None, None, None)
        self.optimizer.step()
        for callback in self.callbacks:
            callback.on_optimizer_step(None, None, None)
        self.state.global_step += 1
        self.optimizer.zero_grad()


class SFTTrainer(Stand):
    def __init__(self) -> None:
        super().__init__(loss_type="nll", label_smoothing_factor=0.0)

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return -model(inputs["input_ids"], inputs["labels"]).log_probs.sum() / num_items_in_batch


class DPOTrainer(Stand):
    def __init__(self, sign: float = 1.0) -> None:
        super().__init__(loss_type="sigmoid", beta=0.5, label_smoothing=0.0, max_length=None)
        self.sign, self.ref_model = sign, Model()

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        with torch.no_grad():
            reference = self.ref_model(inputs["input_ids"], labels).log_probs.sum(1)
        chosen, rejected = (model(inputs["input_ids"], labels).log_probs.sum(1) - reference).chunk(2)
        return -functional.logsigmoid(self.sign * 0.5 * (chosen - rejected)).mean() / 2


class GRPOTrainer(Stand):
    num_generations = 2

    def __init__(self) -> None:
        super().__init__(
            loss_type="dapo", scale_rewards="group", epsilon=0.2, epsilon_high=None, delta=None, beta=0.0,
            max_completion_length=2, temperature=1.0,
        )  # fmt: skip
        self.reward_weights = torch.ones(1)

    def _calculate_rewards(self) -> torch.Tensor:
        return torch.tensor([[1.0], [3.0]])

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        scores = self._calculate_rewards()[:, 0]
        parts = {"prompt": slice(0, 1), "completion": slice(1, 3)}
        made = {f"{name}_ids": IDS[:, part] for name, part in parts.items()}
        made |= {f"{name}_mask": REAL[:, part] for name, part in parts.items()}
        return {**made, "advantages": (scores - 2.0) / (scores.std() + 1e-4), "num_items_in_batch": REAL[:, 1:3].sum()}

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        logprobs = model(ids, ids).log_probs[:, -2:]
        ratio = torch.exp(logprobs - logprobs.detach())
        return (
            -(ratio * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]).sum()
            / inputs["num_items_in_batch"]
        )


def findings_of(folder: Path, step: int = 1) -> Any:
    return judge(AuditedStep(read_record(folder / f"step_{step:06}")))


def agreeing(findings: Any) -> set[str]:
    assert first_wrong(findings) is None, verdict(findings)
    return {finding.name for finding in findings if finding.state == AGREES}


OPTIMIZER = {"grad_norm", "clipped_gradients", "learning_rate", "weights_after"}


def test_sft_and_what_is_put_back(tmp_path: Path):
    trainer = SFTTrainer()
    batches = [
        {"input_ids": IDS, "attention_mask": REAL, "labels": IDS.masked_fill(REAL == 0, -100)},
        {"input_ids": IDS[:1], "attention_mask": REAL[:1], "labels": IDS[:1]},
    ]
    with threestep.audit.recorded(trainer, tmp_path, steps=(1, 2)):
        for _ in range(2):
            trainer.step(batches, torch.tensor(7))
    judged = {"denominator", "loss", "micro_losses", "backward_loss", *OPTIMIZER}
    for step in (1, 2):
        assert agreeing(findings_of(tmp_path, step)) == {"token_ids", *judged}
    trainer.step(batches, torch.tensor(7))
    assert not trainer.callbacks and not trainer.model._forward_hooks and "compute_loss" not in vars(trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_a_wrong_count_is_named(tmp_path: Path):
    trainer = SFTTrainer()
    batches = [{"input_ids": IDS, "attention_mask": REAL, "labels": IDS.masked_fill(REAL == 0, -100)}]
    with threestep.audit.recorded(trainer, tmp_path):
        trainer.step(batches, torch.tensor(6))  # four targets, and the first token of both rows
    wrong = first_wrong(findings_of(tmp_path))
    assert wrong.name == "denominator" and "one extra token per sequence" in wrong.difference.causes[0]


@pytest.mark.parametrize(("sign", "cause"), [(1.0, ""), (-1.0, "chosen and rejected are swapped")])
def test_dpo(tmp_path: Path, sign: float, cause: str):
    trainer = DPOTrainer(sign)
    batch = {"input_ids": IDS, "attention_mask": REAL, "completion_mask": REAL * torch.tensor([0, 1, 1, 1])}
    batch["input_ids"] = IDS.clone()
    batch["input_ids"][:, 0] = 3  # a prompt of both
    with threestep.audit.recorded(trainer, tmp_path):
        trainer.step([batch, batch])
    findings = findings_of(tmp_path)
    if sign > 0:
        judged = {"token_ids", "data_mask", "loss_mask", "loss", "backward_loss"}
        assert agreeing(findings) == {*judged, *OPTIMIZER}
    else:
        wrong = first_wrong(findings)
        assert wrong.name == "loss" and cause in wrong.difference.causes


def test_grpo(tmp_path: Path):
    trainer = GRPOTrainer()
    with threestep.audit.recorded(trainer, tmp_path):
        made = trainer._generate_and_score_completions(None)
        rows = [{name: value if value.ndim == 0 else value[[row]] for name, value in made.items()} for row in (1, 0)]
        trainer.step(rows)
    judged = {"rollout_advantages", "advantages", "token_ids", "loss_mask", "loss", "backward_loss"}
    assert agreeing(findings_of(tmp_path)) == {*judged, *OPTIMIZER}


class RewardTrainer(Stand):
    def __init__(self) -> None:
        super().__init__(center_rewards_coefficient=0.01)
        self.model = Scores()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        chosen, rejected = model(inputs["input_ids"], inputs["attention_mask"]).logits.squeeze(-1).chunk(2)
        losses = -functional.logsigmoid(chosen - rejected - inputs["margin"])
        return (losses.mean() + 0.01 * ((chosen + rejected) ** 2).mean()) / 2


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        means = (self.embed(input_ids) * attention_mask.unsqueeze(-1)).sum(1)
        return SimpleNamespace(logits=self.head(means))


def test_rewards(tmp_path: Path):
    trainer = RewardTrainer()
    batch = {"input_ids": IDS, "attention_mask": REAL, "margin": torch.tensor([0.5])}
    with threestep.audit.recorded(trainer, tmp_path):
        trainer.step([batch, {**batch, "margin": torch.tensor([1.5])}])
    assert agreeing(findings_of(tmp_path)) == {"token_ids", "loss", "backward_loss", *OPTIMIZER}


class KTOTrainer(Stand):
    """Each micro-batch has a point of its own, which is logged."""

    def __init__(self, bounded: bool = True, swapped: bool = False) -> None:
        super().__init__(loss_type="kto", beta=0.5, desirable_weight=1.2, undesirable_weight=0.8)
        self.bounded, self.swapped, self.ref_model = bounded, swapped, Model()
        self.ref_model.load_state_dict(self.model.state_dict())
        self.ref_model.head.bias.data[6] += 1.0  # one point above 0, and one below before it is bounded
        self._metrics: dict[str, dict[str, list[float]]] = {"train": {"kl": []}}

    def _sums(self, model: Any, inputs: Any, kind: str = "") -> torch.Tensor:
        ids, mask = inputs[f"{kind}input_ids"], inputs[f"{kind}completion_mask"]
        return model(ids, ids.masked_fill(mask == 0, -100)).log_probs.sum(1)

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        with torch.no_grad():
            kl = (self._sums(model, inputs, "KL_") - self._sums(self.ref_model, inputs, "KL_")).mean()
            reference = self._sums(self.ref_model, inputs)
        point = kl.clamp(min=0) if self.bounded else kl
        self._metrics["train"]["kl"].append(point.item())
        good = inputs["label"] != self.swapped
        gain = torch.where(good, 0.5, -0.5) * (self._sums(model, inputs) - reference - point)
        return (torch.where(good, 1.2, 0.8) * (1 - torch.sigmoid(gain))).mean() / 2


@pytest.mark.parametrize(
    ("bounded", "swapped", "quantity", "cause"),
    [
        (True, False, "", ""),
        (False, False, "reference_points", "the points are not bounded by 0"),
        (True, True, "loss", "chosen and rejected are swapped"),
    ],
)
def test_kto(tmp_path: Path, bounded: bool, swapped: bool, quantity: str, cause: str):
    trainer = KTOTrainer(bounded, swapped)
    ids = torch.cat([torch.full((2, 1), 3), IDS], 1)
    masks = torch.cat([torch.zeros(2, 1, dtype=torch.int64), REAL], 1)
    real = torch.cat([torch.ones(2, 1, dtype=torch.int64), REAL], 1)
    batch = {"input_ids": ids, "attention_mask": real, "completion_mask": masks, "label": torch.tensor([True, False])}
    batch |= {"KL_input_ids": ids.flip(0), "KL_attention_mask": real.flip(0), "KL_completion_mask": masks.flip(0)}
    other = {**batch, "label": torch.tensor([True, True]), "KL_completion_mask": masks.flip(0) * (ids.flip(0) == 9)}
    with threestep.audit.recorded(trainer, tmp_path):
        trainer.step([batch, other])
    points = read_record(tmp_path / "step_000001").ranks[0]["reference_points"]
    assert points[0] != points[1]
    findings = findings_of(tmp_path)
    if not quantity:
        judged = {"token_ids", "data_mask", "loss_mask", "reference_points", "loss", "backward_loss"}
        assert agreeing(findings) == {*judged, *OPTIMIZER}
    else:
        wrong = first_wrong(findings)
        assert wrong.name == quantity and cause in wrong.difference.causes, verdict(findings)


def test_rows_of_an_older_kto_are_refused(tmp_path: Path):
    trainer = KTOTrainer()
    trainer.compute_loss = lambda model, inputs, num_items_in_batch=None: model(IDS, IDS).log_probs.sum()
    with (
        pytest.raises(ThreestepError, match="KTO needs input_ids, attention_mask, completion_mask, label among the"),
        threestep.audit.recorded(trainer, tmp_path),
    ):
        trainer.step([{"prompt_input_ids": IDS}])


class RLOOTrainer(GRPOTrainer):
    """The reference is the policy of the start; the response is one action."""

    def __init__(self, level: str = "sequence sum") -> None:
        super().__init__()
        self.level = level
        vars(self.args).update(beta=0.5, reward_clip_range=None, normalize_advantages=False, learning_rate=2e-3)
        self.optimizer.param_groups[0]["lr"] = 2e-3  # a ratio that is not clipped
        self.ref_model = Model()
        self.reward_funcs = [None]

    def _get_per_token_logps_and_entropies(self, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (model(ids, ids).log_probs[:, -2:],)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        made = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            old, ref = (
                self._get_per_token_logps_and_entropies(model, IDS[:, :3])[0] for model in (self.model, self.ref_model)
            )
        sums, kl = ((part * REAL[:, 1:3]).sum(1) for part in (old, old - ref))
        outcome = torch.tensor([1.0, 3.0]) - 0.5 * kl
        return {**made, "advantages": outcome - outcome.flip(0), "old_logps": sums}

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        logprobs = model(ids, ids).log_probs[:, -2:]
        ratio = torch.exp((logprobs * inputs["completion_mask"]).sum(1) - inputs["old_logps"])
        ratio = ratio if self.level == "sequence sum" else ratio ** (1.0 / inputs["completion_mask"].sum(1))
        held = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * inputs["advantages"], held * inputs["advantages"]).mean() / 2


@pytest.mark.parametrize("level", ["sequence sum", "sequence mean"])
def test_rloo(tmp_path: Path, level: str):
    trainer = RLOOTrainer(level)
    with threestep.audit.recorded(trainer, tmp_path, steps=(1, 2)):
        made = trainer._generate_and_score_completions(None)
        rows = [{name: value if value.ndim == 0 else value[[row]] for name, value in made.items()} for row in (1, 0)]
        for _ in range(2):
            trainer.step(rows)
    judged = {"rollout_ref_logprobs", "rollout_advantages", "advantages", "old_logprobs", "token_ids", "loss_mask"}
    judged |= {"loss", "backward_loss"}
    assert agreeing(findings_of(tmp_path)) == {*judged, *OPTIMIZER}
    if level == "sequence sum":
        assert agreeing(findings_of(tmp_path, 2)) == {*judged, *OPTIMIZER}
    else:
        wrong = first_wrong(findings_of(tmp_path, 2))
        assert wrong.name == "loss" and "the ratio is per sequence (GSPO)" in wrong.difference.causes


def test_a_gradient_of_another_loss_than_the_reported_one(tmp_path: Path):
    trainer = SFTTrainer()
    batches = [{"input_ids": IDS, "attention_mask": REAL, "labels": IDS.masked_fill(REAL == 0, -100)}] * 2
    with threestep.audit.recorded(trainer, tmp_path):
        recorded = trainer.accelerator.backward
        trainer.accelerator.backward = lambda loss: recorded(2 * loss)
        trainer.step(batches, torch.tensor(8))
    wrong = first_wrong(findings_of(tmp_path))
    assert wrong.name == "backward_loss"
    assert any("not divided by the number of micro-batches" in cause for cause in wrong.difference.causes)


def test_trainers_that_a_program_makes(tmp_path: Path):
    train = SFTTrainer.train
    batches = [{"input_ids": IDS, "attention_mask": REAL, "labels": IDS.masked_fill(REAL == 0, -100)}]
    with threestep.audit.recorded(SFTTrainer, tmp_path):
        SFTTrainer().train(batches, torch.tensor(4))
    assert SFTTrainer.train is train and "train" not in vars(SFTTrainer)
    assert first_wrong(findings_of(tmp_path)) is None


def test_other_trainers_are_refused():
    known = "SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer, Trainer"
    words = f"recorded expects one of {known} from TRL or transformers, or a subclass of one, got Stand"
    with (
        pytest.raises(ThreestepError, match=words),
        threestep.audit.recorded(Stand(), "record"),
    ):
        pass
    with pytest.raises(AttributeError, match="no attribute 'record'"):
        _ = threestep.plugins.audit.record
