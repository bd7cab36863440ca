"""Step 3 by its command line with vLLM: two ranks under ZeRO-3 with LoRA, an engine that dies, and images."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.end_to_end import test_images
from tests.end_to_end.conftest import SHARED, pairs_file, place, run_step, save_start  # noqa: F401  # fixtures

pytestmark = pytest.mark.timeout(900)  # on a busy machine

OWN = """
import os

calls = 0

def letters(prompts, responses, **columns):
    global calls
    calls += 1
    if os.environ.get("VLLM_DIES") and calls == 2:  # the first is the evaluation's, the second the first rollout's
        from vllm.v1.engine.llm_engine import LLMEngine

        def dying(self):
            raise RuntimeError("an illegal memory access was encountered")

        LLMEngine.step = dying
    return [sum(letter.isalpha() for letter in response) / 10 for response in responses]
"""


@pytest.fixture(scope="module")
def flags(place, pairs_file) -> list[object]:  # noqa: F811
    (place / "letters.py").write_text(OWN)
    return [
        *("--actor_model_name_or_path", save_start(place / "start_of_vllm", pad_is_eos=True)),
        *("--data_path", f"jsonl:{pairs_file}", "--data_output_path", place / "vllm_cache", *SHARED.split()),
        *"--actor_learning_rate 1e-3 --max_answer_seq_len 8 --num_samples_per_prompt 2 --advantage grpo".split(),
        *"--per_device_generation_batch_size 4 --per_device_training_batch_size 8".split(),
        *("--rollout_engine", "vllm", "--vllm_cache_gib", 0.05, "--reward", f"{place / 'letters.py'}:letters"),
    ]


def metrics_of(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_under_zero_3_with_adapters(place, flags):  # noqa: F811
    folder = place / "vllm_together"
    own = "--dtype bf16 --actor_zero_stage 3 --actor_lora_dim 4 --max_train_steps 2 --vllm_check_weights true".split()
    ran = run_step(3, [*flags, *own, "--output_dir", folder], ranks=2)
    assert ran.code == 0, ran.words
    steps = [line for line in metrics_of(folder) if "time/weights_to_vllm" in line]
    # The evaluation before training sends the weights; the first rollout finds them.
    assert [line["time/weights_to_vllm"] > 0 for line in steps] == [True, True]
    # bfloat16's forwards differ; the correction is on by itself and sees it.
    assert all(0 < line["rollout/logprob_mismatch"] < 0.1 and "mismatch/clipped_share" in line for line in steps), steps


def test_an_engine_that_dies_leaves_a_whole_checkpoint(place, flags):  # noqa: F811
    own = "--dtype fp32 --max_train_steps 3 --save_every 1".split()
    straight, broken = place / "vllm_straight", place / "vllm_broken"
    ran = run_step(3, [*flags, *own, "--output_dir", straight])
    assert ran.code == 0, ran.words
    ran = run_step(3, [*flags, *own, "--output_dir", broken], environment={"VLLM_DIES": "1"})
    assert ran.code != 0
    assert (
        "vLLM failed while generating responses: RuntimeError: an illegal memory access was encountered; " in ran.stderr
    )
    assert "Traceback" not in ran.stderr
    ran = run_step(3, [*flags, *own, "--output_dir", broken, "--resume"])
    assert ran.code == 0, ran.words
    whole, resumed = (load_file(folder / "model" / "model.safetensors") for folder in (straight, broken))
    assert all(whole[name].equal(resumed[name]) for name in whole)


def test_grpo_on_images_rolls_out_dumps_and_resumes(tmp_path):
    """Two pictures a prompt, three samples each; the second run goes on from the first's checkpoint."""
    folder = test_images.filled(tmp_path, width=64)
    engine = "--rollout_engine vllm --vllm_cache_gib 0.05 --vllm_check_weights true"
    ran = test_images.ppo(folder, "grpo", f"{engine} --rollout_dump {folder / 'dump'}")
    assert ran.code == 0, ran.words
    steps = [line for line in metrics_of(folder / "grpo") if "time/weights_to_vllm" in line]
    assert len(steps) == 2 and all(line["rollout/logprob_mismatch"] < 1e-4 for line in steps), steps
    assert steps[0]["actor/ratio"] != 1.0
    samples = [json.loads(line) for line in (folder / "grpo" / "samples.jsonl").read_text().splitlines()]
    assert samples and all(len(sample["images"]) == 2 for sample in samples)
    shutil.copytree(folder / "grpo", folder / "resumed", ignore=shutil.ignore_patterns("model"))
    again = f"{engine} --rollout_dump {folder / 'dump'} --resume {folder / 'resumed' / 'checkpoints' / 'step_000001'}"
    for out, how in (("replayed", f"{engine} --rollout_replay {folder / 'dump'}"), ("resumed", again)):
        ran = test_images.ppo(folder, out, how)
        assert ran.code == 0, ran.words
    # Two ranks under ZeRO-3 with adapters, of which vLLM holds the merged weights.
    sharded = "--dtype bf16 --actor_zero_stage 3 --actor_lora_dim 4 --per_device_training_batch_size 3"
    ran = test_images.ppo(folder, "sharded", f"{engine} {sharded}", ranks=2)
    assert ran.code == 0, ran.words
    steps = [line for line in metrics_of(folder / "sharded") if "time/weights_to_vllm" in line]
    assert len(steps) == 2 and all(0 < line["rollout/logprob_mismatch"] < 0.1 for line in steps), steps
    whole, *others = (
        load_file(folder / out / "model" / "model.safetensors") for out in ("grpo", "replayed", "resumed")
    )
    assert all(whole[name].equal(other[name]) for other in others for name in whole)
