"""Pairs of runs with one planted difference, bisected: does each end at its very place?

    python -m threestep.plugins.audit.tests.bisected_runs FOLDER [--only NAME ...] [--at_once 2]

Each pair is run, compared by its digests, and run again, by the programs' own command lines, with tiny models. A pair
counts if the step, the part of it and the place are those of the plant. The exit code is 1 where one is elsewhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked_programs import Program, end, run_python, start_python
from tests.support.planted_runs import AT, VARIABLE
from threestep.plugins.audit.bisect.bisect import Bisection, bisect
from threestep.plugins.audit.bisect.digest_files import read_digests
from threestep.plugins.audit.bisect.rerun import Start
from threestep.plugins.audit.bisect.text import verdict
from training.utils.run.launch import free_port

DATA = (
    "--data_path embedded --max_seq_len 64 --max_train_rows 32 --max_eval_rows 2 --eval_interval 0 --dtype fp32".split()
)
SAVED = "--save_every 2 --keep_last 0 --report false --report_to none".split()
ROLLOUT = (
    "--max_answer_seq_len 8 --max_prompt_seq_len 40 --max_train_steps 4 --reward length --reward_length_characters 12 "
    "--per_device_generation_batch_size 4 --per_device_training_batch_size 8 --num_samples_per_prompt 2 "
    "--actor_learning_rate 1e-3 --advantage grpo --kl_in loss"
).split()
PROGRAMS = {
    "sft": "training.step1_sft.main",
    "reward": "training.step2_reward.main",
    "dpo": "training.step2_dpo.main",
    "ppo": "training.step3_ppo.main",
}


@dataclass(frozen=True)
class Pair:
    """plant: of run B. a, b: flags of each. ranks: of each. expected: the step, its part, and words of the place."""

    program: str
    plant: str
    expected: tuple[int, str, str]
    a: str = ""
    b: str = ""
    ranks: tuple[int, int] = (1, 1)
    start_b: str = ""


def _own(program: str, plant: str, part: str, words: str, **more: Any) -> tuple[str, Pair]:
    return f"{program} {plant.replace('_', ' ')}", Pair(program, plant, (AT, part, words), **more)


def _flag(program: str, flags: str, part: str, words: str) -> tuple[str, Pair]:
    return f"{program} {flags}", Pair(program, "", (1, part, words), b=flags)


def _pair(name: str, plant: str, step: int, part: str, words: str, **more: Any) -> tuple[str, Pair]:
    return name, Pair("sft", plant, (step, part, words), **more)


NOWHERE = (0, "", "")
_TWO: dict[str, Any] = {"ranks": (2, 2)}
PAIRS: dict[str, Pair] = dict([
    _own("sft", "row", "data", "rows, row"),
    _own("sft", "token", "data", "token_ids, row"),
    _own("sft", "mask", "data", "loss_mask, row"),
    _own("sft", "weight", "weights", "layers.0.mlp.up_proj.weight"),
    _own("sft", "weight_by_a_bit", "weights", "layers.1.input_layernorm.weight"),
    _own("sft", "random_state", "data", "random"),
    _own("sft", "first_moment", "backward", "layers.1.self_attn.o_proj.weight"),
    _own("sft", "second_moment", "optimizer", "layers.0.self_attn.k_proj.weight"),
    _own("sft", "mlp_output", "forward", "layers.1.mlp.down_proj"),
    _own("sft", "query", "forward", "layers.0.self_attn.q_proj"),
    _own("sft", "norm_output", "forward", "layers.1.post_attention_layernorm"),
    _own("sft", "attention_output", "forward", "layers.0.self_attn.o_proj"),
    _own("sft", "output_gradient", "backward", "layers.0.mlp.gate_proj"),
    _own("sft", "weight_gradient", "backward", "layers.0.self_attn.v_proj.weight"),
    _own("sft", "embedding_gradient", "backward", "embed_tokens.weight"),
    _own("sft", "logprobs", "forward", "logprobs, row"),
    _own("sft", "loss", "forward", "loss"),
    _own("sft", "learning_rate", "optimizer", "learning_rate"),
    _own("sft", "weight_decay", "optimizer", "weights after"),
    _own("sft", "beta2", "optimizer", "weights after"),
    _own("sft", "clipping", "backward", "gradient"),
    _flag("sft", "--learning_rate 2e-3", "optimizer", "learning_rate"),
    _flag("sft", "--weight_decay 0.5", "optimizer", "weights after"),
    _flag("sft", "--max_grad_norm 0.1", "backward", "gradient"),
    _flag("sft", "--z_loss_coef 1e-3", "forward", "loss"),
    _flag("sft", "--neftune_noise_alpha 5", "forward", "layers.0.input_layernorm"),
    _pair("sft start's weight", "", 1, "weights", "layers.1.mlp.gate_proj.weight", start_b="changed"),
    _pair("sft version of a norm", "other_norm", 1, "forward", "layers.0.input_layernorm"),
    _pair("sft version of an activation", "other_activation", 1, "forward", "layers.0.mlp.down_proj"),
    _pair("sft version of AdamW", "other_adamw", 1, "optimizer", "weights after"),
    _own("sft", "dropped_gradient", "backward", "rank 1", **_TWO),
    _pair("sft token of rank 1, ZeRO 2", "token", AT, "data", "(rank 1), token 1", a="--zero_stage 2", **_TWO),
    _pair("sft 1 and 2 ranks, ZeRO 3", "dropped_gradient", AT, "backward", "", ranks=(1, 2), b="--zero_stage 3"),
    _pair("sft packed and padded", "large_output", AT, "forward", "layers.0.mlp.down_proj", b="--padded true"),
    _pair(
        "sft 1 and 2 ranks, bf16", "dropped_gradient", AT, "backward", "gradient of the output", a="--dtype bf16",
        ranks=(1, 2),
    ),
    _pair("sft stages 1 and 3", "token", AT, "data", "token_ids", a="--zero_stage 1", b="--zero_stage 3", **_TWO),
    _own("dpo", "reference", "forward", "ref_logprob_sums"),
    _own("dpo", "query", "forward", "layers.0.self_attn.q_proj"),
    _flag("dpo", "--beta 0.2", "forward", "beta"),
    _own("reward", "score", "forward", "model.norm"),
    _own("reward", "pair_weight", "forward", "loss"),
    _own("reward", "row", "data", "rows, row"),
    _own("ppo", "sample", "data", "token_ids"),
    _own("ppo", "sampling_logprobs", "rollout", "sampling_logprobs, response"),
    _own("ppo", "rollout_score", "rollout", "scores, response 0"),
    _own("ppo", "rollout_advantage", "rollout", "advantages, response 2"),
    _own("ppo", "old_logprobs", "rollout", "old_logprobs, response 0", a="--ppo_epochs 2"),
    ("ppo --kl_coef 0.5", Pair("ppo", "", (2, "forward", "loss"), b="--kl_coef 0.5")),
])  # fmt: skip


_ONE_OF_TWO = "--per_device_generation_batch_size 2 --per_device_training_batch_size 4"
# Pairs without a fault: rounding differs in all but the first.
HEALTHY = {
    "sft twice": Pair("sft", "", NOWHERE),
    "sft healthy, 1 and 2 ranks": Pair("sft", "", NOWHERE, ranks=(1, 2)),
    "sft healthy, ZeRO 0 and 3": Pair("sft", "", NOWHERE, b="--zero_stage 3", ranks=(2, 2)),
    "sft healthy, packed and padded": Pair("sft", "", NOWHERE, b="--padded true"),
    "sft healthy, bf16, 1 and 2 ranks": Pair("sft", "", NOWHERE, a="--dtype bf16", ranks=(1, 2)),
    "sft healthy, bf16, ZeRO 1 and 3": Pair(
        "sft", "", NOWHERE, a="--dtype bf16 --zero_stage 1", b="--zero_stage 3", ranks=(2, 2)
    ),
    "dpo healthy, packed and padded": Pair("dpo", "", NOWHERE, b="--padded true"),
    "reward healthy, 1 and 2 ranks": Pair("reward", "", NOWHERE, ranks=(1, 2)),
    "ppo healthy, 1 and 2 ranks": Pair("ppo", "", NOWHERE, b=_ONE_OF_TWO, ranks=(1, 2)),
}


@dataclass
class Bench:
    """Runs pairs in a folder. The first runs are shared by pairs of the same flags."""

    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def start_model(self, name: str = "start") -> Path:
        """A tiny model; `changed`: with one weight of a layer moved."""
        from threestep.plugins.programs import new_model

        place = self.folder / name
        if not place.exists():
            shape = "--vocab_size 353 --hidden_size 32 --num_hidden_layers 2 --num_attention_heads 2".split()
            new_model.main(["--data_path", "embedded", "--out", str(place), "--seed", "1", *shape])
            if name == "changed":
                _move_a_weight(place / "model.safetensors")
        return place

    def flags(self, pair: Pair, side: int, output: Path) -> list[str]:
        """The command line of a run."""
        start = self.start_model(pair.start_b if side and pair.start_b else "start")
        model = "--actor_model_name_or_path" if pair.program == "ppo" else "--model_name_or_path"
        own = [model, str(start), "--data_output_path", str(self.folder / "cache"), "--output_dir", str(output)]
        size = ["--per_device_train_batch_size", str(4 // pair.ranks[side]), "--learning_rate", "1e-3"]
        size += ["--max_train_steps", "4"]
        size = ROLLOUT if pair.program == "ppo" else size
        return [*own, *DATA, *SAVED, *size, *pair.a.split(), *(pair.b.split() if side else ())]

    def run(self, pair: Pair, side: int, name: str) -> Path:
        """The folder of a run; of those without a plant it is made once."""
        plant = pair.plant if side else ""
        shared = name if side else f"{pair.program} {pair.a} {pair.ranks[0]}"
        output = self.folder / shared.replace(" ", "_").replace("/", "_")
        if not (output / "digests.jsonl").exists() or side:
            words = [PROGRAMS[pair.program], *self.flags(pair, side, output), "--overwrite"]
            done = run_python(_words(words), _environment(plant), pair.ranks[side], timeout_seconds=900)
            assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return output

    def bisected(self, name: str, pair: Pair) -> Bisection:
        """Run a pair, and bisect it. B's flags stand after A's, so that they win."""
        runs = [read_digests(self.run(pair, side, name)) for side in (0, 1)]
        starts = [starter(plant) for plant in ("", pair.plant)]
        return bisect(runs[0], runs[1], self.folder / f"again_{name.replace(' ', '_')}", starts)


def is_there(found: Bisection, expected: tuple[int, str, str]) -> bool:
    """Whether a bisection ends where it should; step 0: nowhere."""
    step, part, words = expected
    if not step:
        return found.comparison.first is None
    said = verdict(found)
    key = found.key if found.located else (found.comparison.first.key if found.comparison.first else None)
    return key is not None and key[0] == step and f" {part}: " in said and words in said.partition(f" {part}: ")[2]


def _move_a_weight(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    tensors["model.layers.1.mlp.gate_proj.weight"][2, 3] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def _words(words: Sequence[str]) -> list[str]:
    return ["-m", "tests.support.planted_runs", *words]


def _environment(plant: str) -> dict[str, str]:
    own = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", VARIABLE: plant}
    return {**os.environ, **own, "THREESTEP_RANKS": "1"}


@dataclass
class _Ranks:
    """Forked ranks, as `rerun` watches them."""

    programs: list[Program]

    def poll(self) -> int | None:
        codes = [program.poll() for program in self.programs]
        return next((code for code in codes if code is not None), None)

    def stop(self) -> None:
        for program in self.programs:
            end(program)


def starter(plant: str) -> Start:
    """Return what starts a program with a difference planted in it; "": with none."""

    def start(words: Sequence[str], ranks: int, output: Path) -> _Ranks:
        environments: list[Mapping[str, str]] = [_environment(plant)]
        if ranks > 1:
            meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            environments = [
                {**_environment(plant), **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
            ]
        return _Ranks([start_python(_words(words), each, output, output) for each in environments])

    return start


def main() -> None:
    """Run all pairs, print where each ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--at_once", type=int, default=2)
    given = parser.parse_args()
    bench = Bench(Path(given.folder).resolve())
    bench.folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: pair for name, pair in {**PAIRS, **HEALTHY}.items() if not given.only or name in given.only}
    for name in ("start", "changed"):
        bench.start_model(name)
    for name, pair in chosen.items():  # those that others share, one after the other
        bench.run(pair, 0, name)
    with ThreadPoolExecutor(given.at_once) as pool:
        right = [*pool.map(partial(_tried, bench), chosen.items())]
    planted = sum(name in PAIRS for name in chosen)
    print(f"{sum(right)} of {len(right)} pairs are right, {planted} of them with a difference planted")
    sys.exit(0 if all(right) else 1)


def _tried(bench: Bench, named: tuple[str, Pair]) -> bool:
    name, pair = named
    started = time.monotonic()
    try:
        found = bench.bisected(name, pair)
    except Exception as problem:  # noqa: BLE001  # one pair that fails does not end the others
        print(f"FAILED {name}: {type(problem).__name__}: {problem}", flush=True)
        return False
    right = is_there(found, pair.expected)
    print(f"{'right' if right else 'WRONG'} {name} ({time.monotonic() - started:.0f} s): {verdict(found)}", flush=True)
    first = found.comparison.first
    if first is not None and first.bound:
        print(f"      before {first.before:.1e}, bound {first.bound:.1e}, there {first.compared.apart:.1e}", flush=True)
    for note in found.notes:
        print(f"      note: {note}")
    return right


if __name__ == "__main__":
    main()
