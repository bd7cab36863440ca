"""Pairs of runs with one planted difference, bisected: run, compared by their digests, and run again, by the programs'
own command lines, with tiny models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_programs import Program, end, run_python, start_python
from tests.support.new_models import save_new_model
from threestep.plugins.audit.bisect.bisect import Bisection, bisect
from threestep.plugins.audit.bisect.digest_files import read_digests
from threestep.plugins.audit.bisect.rerun import Start
from threestep.plugins.audit.bisect.text import verdict
from threestep.plugins.audit.tests.planted_runs import AT, VARIABLE
from training.utils.base.machine import free_port

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


PAIRS = {
    "sft token": Pair("sft", "token", (AT, "data", "token_ids, row")),
    "sft second moment": Pair("sft", "second_moment", (AT, "optimizer", "layers.0.self_attn.k_proj.weight")),
    "sft 1 and 2 ranks, ZeRO 3": Pair(
        "sft", "dropped_gradient", (AT, "backward", ""), b="--zero_stage 3", ranks=(1, 2)
    ),
    "dpo query": Pair("dpo", "query", (AT, "forward", "layers.0.self_attn.q_proj")),
    "ppo rollout score": Pair("ppo", "rollout_score", (AT, "rollout", "scores, response 0")),
    # Without a fault: rounding alone differs.
    "sft healthy, ZeRO 0 and 3": Pair("sft", "", (0, "", ""), b="--zero_stage 3", ranks=(2, 2)),
}


@dataclass
class Bench:
    """Runs pairs in a folder. The first runs are shared by pairs of the same flags."""

    folder: Path
    made: dict[str, Path] = field(default_factory=dict)

    def start_model(self) -> Path:
        """A tiny model."""
        place = self.folder / "start"
        return place if place.exists() else save_new_model(place)

    def flags(self, pair: Pair, side: int, output: Path) -> list[str]:
        """The command line of a run."""
        start = self.start_model()
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


def _words(words: Sequence[str]) -> list[str]:
    return ["-m", "threestep.plugins.audit.tests.planted_runs", *words]


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
