"""Records of rollouts as verl, OpenRLHF and AReaL hold them, made by hand; and of prime-rl's exports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threestep.plugins.audit.judge import AGREES, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recorders.frameworks import areal_record, openrlhf_record, verl_record
from threestep.plugins.audit.recorders.prime_rl import prime_rl_record
from threestep.plugins.audit.recording.files import StepRecord, read_record, write_record
from threestep.plugins.audit.text import verdict
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit

# Two responses to a prompt, of 2 and 1 tokens; rewards 1 and 0 at their ends. GAE of values 0.5, gamma = lambda = 1:
# what is still to come less the value. In a group: (1 - 1/2) / sqrt(1/2) = 0.70711.
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
VALUES = torch.full((2, 3), 0.5)
REWARDS = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
ADVANTAGES = torch.tensor([[0.5, 0.5, 9.0], [-0.5, 9.0, 9.0]])  # 9: padding, which no record has
RETURNS = ADVANTAGES + VALUES
GAE = {"advantage": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False, "kl_in": "none"}
GROUPS = {"advantage": "grpo", "norm_by": "group", "std_ddof": 1.0, "std_epsilon": 0.0, "kl_in": "none"}


def agreeing(record: StepRecord, folder: Path) -> set[str]:
    write_record(folder, record)
    findings = judge(AuditedStep(read_record(folder)))
    assert first_wrong(findings) is None, verdict(findings)
    return {finding.name for finding in findings if finding.state == AGREES}


def batch(**changes: Any) -> Any:
    parts = {
        "response_mask": MASK, "token_level_scores": REWARDS, "token_level_rewards": REWARDS, "values": VALUES,
        "advantages": ADVANTAGES, "returns": RETURNS,
    }  # fmt: skip
    return SimpleNamespace(batch=parts | changes, non_tensor_batch={"uid": ["a", "a"]})


def test_verl(tmp_path: Path):
    assert agreeing(verl_record(batch(), GAE), tmp_path) == {"rollout_rewards", "rollout_advantages", "rollout_returns"}
    group = 0.5**0.5 * torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    assert "rollout_advantages" in agreeing(
        verl_record(batch(advantages=group, values=None, returns=None), GROUPS), tmp_path
    )


@pytest.mark.parametrize(
    ("recorded", "said", "scale"),
    [
        ({"advantage": "grpo"}, {}, 0.5**0.5),
        ({"norm_by": "none"}, {"advantage": "grpo"}, 0.5**0.5),  # of an estimator of the user's own
        ({"advantage": "grpo", "norm_by": "none"}, {"advantage": "grpo"}, 0.5),  # Dr. GRPO
        ({"advantage": "grpo"}, {"advantage": "rloo"}, 1.0),
    ],
)
def test_an_estimator_implies_its_norm(recorded, said, scale):
    group = scale * torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    record = verl_record(batch(advantages=group), {**recorded, "kl_in": "none"})
    findings = {finding.name: finding for finding in judge(AuditedStep(record, said))}
    assert findings["rollout_advantages"].state == AGREES, verdict([*findings.values()])


def test_a_wrong_group_of_verl_is_named(tmp_path: Path):
    group = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])  # the denominator n
    write_record(tmp_path, verl_record(batch(advantages=group), GROUPS))
    wrong = first_wrong(judge(AuditedStep(read_record(tmp_path))))
    assert wrong is not None and wrong.difference is not None
    assert "the standard deviation uses the denominator n (ddof 0)" in wrong.difference.causes


def test_openrlhf(tmp_path: Path):
    rows = [slice(0, 1), slice(1, 2)]
    experiences = [
        SimpleNamespace(
            action_mask=MASK[row, :width].bool(), values=VALUES[row, :width], advantages=ADVANTAGES[row, :width],
            returns=RETURNS[row, :width], rewards=REWARDS[row].sum(dim=1), index=[number],
        )
        for number, (row, width) in enumerate(zip(rows, (3, 1), strict=True))
    ]  # fmt: skip
    assert agreeing(openrlhf_record(experiences, 2, GAE), tmp_path) >= {"rollout_advantages", "rollout_returns"}


def test_areal(tmp_path: Path):
    data = {
        "loss_mask": MASK, "rewards": torch.tensor([1.0, 0.0]), "tot_rewards": REWARDS, "values": VALUES,
        "advantages": ADVANTAGES, "returns": RETURNS,
    }  # fmt: skip
    assert agreeing(areal_record(data, 2, GAE), tmp_path) == {
        "rollout_rewards",
        "rollout_advantages",
        "rollout_returns",
    }


def test_what_is_missing_or_unknown():
    with pytest.raises(ThreestepError, match="verl's DataProto has no tensor response_mask"):
        verl_record(SimpleNamespace(batch={}, non_tensor_batch={}), GAE)
    with pytest.raises(ThreestepError, match="settings of verl_record: unknown name 'gama'.*gamma"):
        verl_record(batch(), {"gama": 1.0})


def export(folder: Path) -> Path:
    place = folder / "step_3"
    place.mkdir()
    rows = [
        {"token_ids": [5, 6, 7, 8, 9], "position_ids": [0, 1, 2, 0, 1], "loss_mask": [False, True, True, False, True],
         "trainer_logprobs": [0.0, -1.0, -2.0, 0.0, None], "inference_logprobs": [0.0, -1.0, -2.0, 0.0, -1.0],
         "advantages": [0.0, 1.0, 1.0, 0.0, -1.0]},
        {"token_ids": [4], "loss_mask": [True], "trainer_logprobs": [-1.0], "inference_logprobs": [-1.0],
         "advantages": [1.0]},
    ]  # fmt: skip
    (place / "rank_0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_prime_rl(tmp_path: Path):
    place = export(tmp_path)
    record = prime_rl_record(place, {"clip_low": 0.2, "clip_high": 0.2}, {"policy_loss": -0.5})
    own = record.ranks[0]
    assert record.head.step == 3 and own["lengths"].tolist() == [3, 2, 1] and own["micro_batches"].tolist() == [0, 0, 1]
    assert str(own["logprobs"][4]) == "nan"  # as it was exported
    (place / "rank_0.jsonl").rename(place / "rank_1.jsonl")
    with pytest.raises(ThreestepError, match="rank_0.jsonl is missing: the token export is incomplete"):
        prime_rl_record(place, {})
    (place / "rank_1.jsonl").unlink()
    with pytest.raises(ThreestepError, match="has no token exports from prime-rl"):
        prime_rl_record(place, {})
    (place / "rank_0.jsonl").write_text('{"token_ids": [1]}\n')
    with pytest.raises(ThreestepError, match="row 1: expected a list 'loss_mask'"):
        prime_rl_record(place, {})
