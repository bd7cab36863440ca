"""Other trainers under the recorder, each in the environment that scripts/other_trainers.sh made.

THREESTEP_OTHER_TRAINERS names the folder of the environments; those that are missing are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from threestep.plugins.audit.judge import AGREES, Finding, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.tests.other_trainers import start
from threestep.plugins.audit.text import verdict

ENVIRONMENTS = os.environ.get("THREESTEP_OTHER_TRAINERS", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENTS, reason="THREESTEP_OTHER_TRAINERS names no folder of environments"),
]
OPTIMIZER = {"grad_norm", "clipped_gradients", "learning_rate", "weights_after"}
LOSSES, POLICY = {"denominator", "loss", "micro_losses"}, {"rollout_advantages", "advantages", "loss_mask", "loss"}
KTO, KTO_BEFORE = "trl kto", "precompute_ref_log_probs=true desirable_weight=1.3 per_device_train_batch_size=4"
SEQUENCES = 'importance_sampling_level="sequence" loss_type="grpo" scale_rewards="batch"'
# Name: environment, arguments, what must agree in both steps.
RIGHT = {
    "sft": ("trl116", "trl sft", LOSSES),
    "dpo": ("trl116", "trl dpo", {"loss_mask", "loss"}),
    "kto": ("trl116", KTO, {"loss_mask", "reference_points", "loss"}),
    "kto, reference before": ("trl116", f"{KTO} {KTO_BEFORE}", {"loss_mask", "reference_points", "loss"}),
    "reward": ("trl116", "trl reward", {"loss"}),
    "grpo": ("trl116", "trl grpo", POLICY),
    "grpo again": (
        "trl116", "trl grpo num_iterations=2 learning_rate=0.002",
        {"rollout_advantages", "old_logprobs", "ref_logprobs", "loss"},
    ),
    "grpo sequences": (
        "trl116", f"trl grpo num_iterations=2 {SEQUENCES}", {"rollout_advantages", "old_logprobs", "loss"},
    ),
    "rloo": ("trl116", "trl rloo", POLICY),
    "rloo again": ("trl116", "trl rloo num_iterations=2 learning_rate=0.01", {"old_logprobs", "loss"}),
    "transformers": ("trl116", "trl plain", LOSSES),
    "trl 0.24 dpo": ("trl024", "trl dpo", {"loss_mask", "logprob_sums", "loss"}),
    "trl 0.24 reward": ("trl024", "trl reward", {"loss"}),
    "llamafactory": ("llamafactory", "chat llamafactory", LOSSES),
}  # fmt: skip
FOUR, CUT = "trl dpo gradient_accumulation_steps=4", 'trl dpo max_length=8 truncation_mode="keep_end"'
DAPO = 'trl grpo gradient_accumulation_steps=4 steps_per_generation=8 loss_type="dapo"'
UNDIVIDED = "not divided by the number of micro-batches"
# Name: environment, arguments, step, the first wrong quantity, words of a cause.
WRONG = {
    "transformers 4.46: the accumulation": ("trl012", FOUR, 2, "loss", UNDIVIDED),
    "trl 0.12: the end of the longest rows": ("trl012", FOUR, 1, "loss_mask", "only in the longest rows"),
    "transformers 4.47: the accumulation, in the gradient alone": ("trl013", FOUR, 1, "backward_loss", UNDIVIDED),
    "trl 0.16: GRPO's normalisation": ("trl016", "trl grpo seed=5", 1, "loss", "the mean over micro-batches"),
    "trl 0.16: DPO's truncation": ("trl016", CUT, 2, "loss_mask", "rows are cut after padding"),
    "trl 0.24: GRPO's normalisation": ("trl024", DAPO, 1, "loss", "the count covers the whole rollout"),
    "transformers 4.57: the count": (
        "trl024", "trl sft completion_only_loss=false", 1, "denominator", "one extra token per sequence",
    ),
    "axolotl: micro-batches": ("axolotl", "chat axolotl", 1, "loss", "the mean over micro-batches of their means"),
}  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start.save(tmp_path_factory.mktemp("start"))


def run(environment: str, module: str, *words: object) -> None:
    python = Path(ENVIRONMENTS, environment, "bin", "python")
    if not python.exists():
        pytest.skip(f"{ENVIRONMENTS} has no environment {environment}")
    program = [str(python), "-m", f"threestep.plugins.audit.tests.other_trainers.{module}", *map(str, words)]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    ran = subprocess.run(program, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


def findings_of(begun: Path, folder: Path, environment: str, words: str) -> list[list[Finding]]:
    """Of both steps."""
    kind, name, *changes = words.split()
    run(environment, f"{kind}_trainers", name, begun, folder, *changes)
    return [judge(AuditedStep(read_record(folder / f"step_{step:06}"))) for step in (1, 2)]


@pytest.mark.parametrize("case", RIGHT)
def test_right_steps_agree(begun: Path, tmp_path: Path, case: str):
    environment, words, judged = RIGHT[case]
    for findings in findings_of(begun, tmp_path, environment, words):
        assert first_wrong(findings) is None, verdict(findings)
        agrees = {finding.name for finding in findings if finding.state == AGREES}
        assert agrees >= judged | OPTIMIZER | {"backward_loss"}


@pytest.mark.parametrize("case", WRONG)
def test_a_fault_is_named_untold(begun: Path, tmp_path: Path, case: str):
    environment, words, step, quantity, cause = WRONG[case]
    findings = findings_of(begun, tmp_path, environment, words)[step - 1]
    wrong = first_wrong(findings)
    assert wrong is not None and wrong.difference is not None and wrong.name == quantity, verdict(findings)
    assert any(cause in sentence for sentence in wrong.difference.causes), verdict(findings)


@pytest.mark.parametrize("name", ["verl", "openrlhf", "areal"])
def test_functions_of_rollouts(tmp_path: Path, name: str):
    run("verl", "policy_functions", name, tmp_path)
    records = sorted(tmp_path.iterdir())
    assert len(records) in (3, 9)
    for record in records:
        findings = judge(AuditedStep(read_record(record)))
        wrong = first_wrong(findings)
        if name == "openrlhf" and record.name.startswith("gae"):
            assert wrong is not None and wrong.name == "rollout_advantages" and wrong.difference is not None
            assert wrong.difference.causes == ("the variance of whitening uses the denominator n",)
        else:
            assert wrong is None, (record.name, verdict(findings))
            assert "rollout_advantages" in {finding.name for finding in findings if finding.state == AGREES}
