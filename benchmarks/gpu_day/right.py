"""Part 1: what a GPU computes beside what a CPU computes, and whether it computes it again to the bit."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day import attention, decoding, machine
from benchmarks.gpu_day.models import SHAPES, random_model
from benchmarks.gpu_day.programs import ON_CPU, Trained, ran, train, training_case
from benchmarks.gpu_day.record import NotHere, Report
from training.utils.base.errors import ThreestepError
from training.utils.models.attention import BY_DOCUMENT, KERNELS, SDPA

# A step's module, and the metrics whose curves are compared.
PROGRAMS = {
    "SFT": ("step1_sft", "train/loss"),
    "reward model": ("step2_reward", "train/loss"),
    "DPO": ("step2_dpo", "train/loss"),
    "PPO": ("step3_ppo", "rollout/score"),
}
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen2": _SMALL,
    "qwen3": _SMALL,
    "mistral": {**_SMALL, "sliding_window": None},
    "gemma2": {**_SMALL, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
}
LONGEST_TOKENS = 64


def measure(report: Report) -> None:
    """The most telling first: the tests, the curves, resuming, decoding, verdicts, determinism."""
    report.case("tests marked gpu", "pytest -m gpu", lambda: _tests(report))
    done: dict[str, Trained] = {}
    for name in PROGRAMS:
        for dtype in ("fp32", "bf16"):
            report.case(
                "curves beside the CPU's in fp32",
                f"{name}, {dtype}",
                lambda n=name, d=dtype: _curve(report, n, d, done),
            )
    report.case("resumed", "SFT, stopped half-way, fp32", lambda: _resumed(report, done))
    report.case("one response in a batch", "batch 1 and 64", lambda: _alone_and_among(report))
    for family in FAMILIES:
        for form in (SDPA, *KERNELS):
            report.case("the start-up check", f"{family}, {form}", lambda f=family, a=form: verdict(f, a))
    for deterministic in (False, True):
        name = "deterministic kernels alone" if deterministic else "as it comes"
        report.case("the same run twice", name, lambda d=deterministic: _twice(report, d))


def _tests(report: Report) -> dict[str, Any]:
    if machine.version("pytest") is None:
        raise NotHere("pytest is not installed")
    done = report.run(["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"], {})
    (report.place / "pytest.txt").write_text(done.stdout + done.stderr)
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    if not counts:
        raise ThreestepError(
            f"pytest ended with code {done.returncode} and no count; see {report.place / 'pytest.txt'}"
        )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {word: int(counts.get(word, 0)) for word in ("passed", "failed", "error", "skipped")} | {
        "which": ", ".join(failed[:5])
    }


# --- the programs


def _curve(report: Report, name: str, dtype: str, done: dict[str, Trained]) -> dict[str, Any]:
    """Return how far the curve is from that of float32 on a CPU."""
    module, metric = PROGRAMS[name]
    if f"{name}, CPU" not in done:
        done[f"{name}, CPU"] = train(report, module, _flags(report, name, "fp32"), f"{module}_cpu", ON_CPU)
    wanted = done[f"{name}, CPU"].curve(metric)
    if dtype == "fp32" and machine.device().type == "cpu":
        got = wanted  # this is that machine: the run would be the same again
    else:
        done[f"{name}, {dtype}"] = train(report, module, _flags(report, name, dtype), f"{module}_{dtype}")
        got = done[f"{name}, {dtype}"].curve(metric)
    apart = [abs(one - other) for one, other in zip(got, wanted, strict=True)]
    return {
        "metric": metric, "steps": len(got), "first step apart": apart[0], "largest": max(apart),
        "at the end": got[-1], "CPU's": wanted[-1], "raw": {"here": got, "cpu": wanted},
    }  # fmt: skip


def _flags(report: Report, name: str, dtype: str) -> list[str]:
    """A program's flags on the embedded task. The critic of PPO is the reward model that was trained here."""
    model, steps = report.place / "model", 20 if report.full else 4
    if not model.exists():
        size = (192, 4, 6) if report.full else (64, 2, 4)
        shape = ["--vocab_size", "300", "--hidden_size", str(size[0]), "--num_hidden_layers", str(size[1])]
        shape += ["--num_attention_heads", str(size[2]), "--rope_theta", "100"]
        ran(
            report,
            ["-m", "threestep.plugins.programs.new_model", "--data_path", "embedded", *shape, "--out", str(model)],
            ON_CPU,
        )
    rows = 32 if report.full else 8
    flags = ["--data_path", "embedded", "--data_split", "10,12,3", "--max_prompt_seq_len", "32", "--seed", "1"]
    flags += ["--dtype", dtype, "--data_output_path", str(report.place / "cache"), "--max_eval_rows", "8"]
    flags += ["--max_train_steps", str(steps), "--save_every", str(steps // 2)]
    if name == "PPO":
        flags += ["--actor_model_name_or_path", str(model), "--max_answer_seq_len", "16"]
        flags += ["--critic_model_name_or_path", str(report.place / "step2_reward_cpu" / "model")]
        flags += ["--per_device_generation_batch_size", str(rows), "--per_device_training_batch_size", str(rows)]
        return flags
    flags += ["--model_name_or_path", str(model), "--max_seq_len", "64", "--learning_rate", "1e-3"]
    flags += ["--per_device_train_batch_size", str(rows), "--max_train_rows", str(rows * steps)]
    return [*flags, "--normalization_rows", "0"] if name == "reward model" else flags


def _resumed(report: Report, done: dict[str, Trained]) -> dict[str, Any]:
    """Return whether a run that stopped half-way gives the losses and weights of one that did not."""
    from safetensors.torch import load_file

    flags = _flags(report, "SFT", "fp32")
    steps = int(flags[flags.index("--max_train_steps") + 1])
    name = "step1_sft_cpu" if machine.device().type == "cpu" else "step1_sft_fp32"
    whole = done.get("SFT, CPU" if machine.device().type == "cpu" else "SFT, fp32")
    whole = whole or train(report, "step1_sft", flags, name)
    again = ["--max_train_steps", str(steps), "--resume"]
    folder = report.place / "stopped"
    _copy_half(report.place / name, folder, steps // 2)
    resumed = train(report, "step1_sft", [*flags, *again], "stopped")
    wanted, got = whole.curve("train/loss")[steps // 2 :], resumed.curve("train/loss")[-(steps - steps // 2) :]
    weights = [load_file(place / "model" / "model.safetensors") for place in (report.place / name, folder)]
    apart = max(float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0])
    losses = max(abs(one - other) for one, other in zip(got, wanted, strict=True))
    return {"losses apart": losses, "weights apart": apart, "to the bit": "yes" if losses == apart == 0 else "no"}


def _copy_half(run: Path, folder: Path, step: int) -> None:
    """Lay out `folder` as the run was when it had saved `step`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "model", ignore_errors=True)
    places = folder / "checkpoints"
    name = f"step_{step:06d}"
    for place in places.glob("step_*"):
        if place.name != name:
            shutil.rmtree(place)
    (places / "latest").write_text(name)
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= step]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


# --- in this process


def _alone_and_among(report: Report) -> dict[str, Any]:
    """Return whether a response is the same token by token in a batch of 64 as by itself."""
    shape, new, batch = ("1300m", 64, 64) if report.full else ("tiny", 8, 5)
    dtype = torch.bfloat16 if report.full else torch.float32
    model = random_model(shape, dtype, machine.device())
    many = decoding.request_of(batch, 32, new, SHAPES[shape][-1])
    among = decoding.TransformersRollout().roll_out(model, many)
    equal, apart = 0, 0.0
    picked = (0, batch // 2, batch - 1)
    for row in picked:
        one = decoding.RolloutRequest(
            many.prompt_ids_BP[row : row + 1], many.prompt_mask_BP[row : row + 1], many.sampling, [many.seeds[row]]
        )
        alone = decoding.TransformersRollout().roll_out(model, one)
        same = bool((alone.response_ids_BR[0] == among.response_ids_BR[row]).all())
        equal += same
        if same:
            difference = alone.sampled_logprobs_BR[0] - among.sampled_logprobs_BR[row]
            apart = max(apart, float(difference.abs().max()))
    return {"compared": len(picked), "equal token by token": equal, "log-probabilities of those apart": apart}


def verdict(family: str, form: str) -> dict[str, Any]:
    """Return what the start-up check says of a family with a form of attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from training.utils.models.layout_check import check_padded, why_not_packed
    from training.utils.models.own_forward import read_own_forward
    from training.utils.models.token_model import PolicyModel

    device = machine.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **FAMILIES[family]
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    read_own_forward(model, LONGEST_TOKENS)
    if form == SDPA and device.type == "cpu":
        from training.utils.models.document_attention import use_document_attention

        use_document_attention(model)
    else:
        attention.give(model, form)

    def read(rows: Any) -> torch.Tensor:
        return PolicyModel(model)(rows).logprobs_M.float()

    check_padded(model, read, device)
    reason = why_not_packed(model, read, LONGEST_TOKENS, device)
    used = model.config._attn_implementation
    return {"computed by": used if used != BY_DOCUMENT else "runs in turn", "verdict": reason or "packs"}


def _twice(report: Report, deterministic: bool) -> dict[str, Any]:
    """Return how far two equal runs are from each other, and their seconds a step."""
    flags = ["--shape", "1300m" if report.full else "tiny", "--tokens", "2048" if report.full else "64", "--steps", "8"]
    flags += ["--documents", "4", *(["--deterministic"] * deterministic)]
    runs = [training_case(report, flags) for _ in range(2)]
    pairs: Sequence[tuple[float, float]] = [(one["loss"], other["loss"]) for one, other in zip(*runs, strict=True)]
    apart = max(abs(one - other) for one, other in pairs)
    seconds = statistics.median(line["seconds"] for run in runs for line in run[3:])
    return {"losses apart": apart, "to the bit": "yes" if apart == 0 else "no", "seconds a step": seconds}
