"""Runs killed at random moments and resumed each time end as the run that was never stopped, to the bit.

    python -m tests.kill_and_resume                                     all programs, 1 and 2 ranks, ZeRO 0, 2, 3
    python -m tests.kill_and_resume --programs ppo --ranks 2 --stages 3 --kills 20 --steps 40 --signal SIGTERM

Of step 3 with an environment (`acting`, and with guesses of a head, `acting_mtp`) each answer takes up to --delay
seconds, at random, and with --rollouts_ahead (`ahead`, `acting_ahead`) each rollout; --repeats runs that are never
stopped are compared as well. With --rollouts_ahead free (`free`, `acting_free`) timing decides, and what is compared is
the run again, from the schedule that it left.

`servers` (K = 1, or --ahead) and `servers_free` draw by rollout servers of the tests' own. While a run is killed or
repeated, --server_kills of these are killed too and started again, and --dead_servers more stay dead.

tests/end_to_end/test_sweeps.py runs a short form, and in the long form of the tests a longer one. One line of
a table is printed for each combination, and the exit code is 1 where one differs. The moment of each kill is drawn from
how long that part of a run took where it was never stopped.
"""

from __future__ import annotations

import argparse
import importlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked_runs import MODULES, Ended, Files, Moment, import_everything, make_files, run, start_flags
from threestep.plugins.report.figures.rollout_account import rollout_account
from training.utils.run.run_folder import ROLLOUTS, read_rollouts

_ADDRESSES = "servers.txt"


@dataclass(frozen=True)
class Case:
    program: str
    ranks: int
    stage: int
    lora: bool = False
    offload: bool = False
    prompts: int = 2  # of a rollout of a rank, in programs without environments
    ahead: int = 1  # of the program `servers`

    @property
    def is_free(self) -> bool:
        return self.program.endswith("free")

    @property
    def by_servers(self) -> bool:
        return self.program.startswith("servers")

    @property
    def name(self) -> str:
        extra = ("_lora" if self.lora else "") + ("_offload" if self.offload else "")
        return f"{self.program}_{self.ranks}_{self.stage}{extra}"

    @property
    def rolls_out(self) -> bool:
        return MODULES[self.program] == "step3_ppo"

    def flags(self, files: Files, steps: int, every: int) -> list[str]:
        """The program's flags, but for its folders. bf16 on one rank, float32 on two; dropout, so that a run draws as
        it trains; in step 3 an adaptive KL, a moving average and unsupervised text too."""
        shared = (
            f"{start_flags(self.program, files)} --eval_fraction 0.1 --max_train_steps {steps} --save_every {every} "
            f"--eval_interval {2 * every} --lr_scheduler_type cosine --num_train_epochs 100 "
            f"--dtype {'bf16' if self.ranks == 1 and not self.by_servers else 'fp32'}"
        )
        if self.offload:
            shared += " --offload true"
        if self.program.startswith("acting"):
            own = (
                f"--actor_zero_stage {self.stage} --actor_dropout 0.1 --actor_learning_rate 1e-3 "
                "--num_samples_per_prompt 4 --per_device_generation_batch_size 3 --per_device_training_batch_size 6 "
                "--max_answer_seq_len 48 --mismatch_correction truncate --mismatch_normalize true"
            )
            own += " --mtp_num_layers 1 --speculate 1" if self.program == "acting_mtp" else ""
            own += " --rollouts_ahead 1" if self.program == "acting_ahead" else ""
            own += " --rollouts_ahead free" if self.is_free else ""
            own += " --actor_lora_dim 4" if self.lora else ""
        elif self.rolls_out:
            own = (
                f"--actor_zero_stage {self.stage} --critic_zero_stage {self.stage} --actor_dropout 0.1 "
                f"--per_device_generation_batch_size {self.prompts} --per_device_training_batch_size {self.prompts} "
                "--max_answer_seq_len 6 --kl_control adaptive --kl_target 0.1 --kl_horizon 100 --enable_ema "
                "--actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --ema_decay 0.5 "
                f"--unsupervised_dataset_name jsonl:{files.texts}"
            )
            if self.program in ("ahead", "free"):
                ahead = "free --max_rollout_age 3" if self.is_free else "2"
                own += f" --rollouts_ahead {ahead} --rollout_engine {files.engine}:LateRollout"
            if self.by_servers:
                own += f" --rollouts_ahead {'free --max_rollout_age 3' if self.is_free else self.ahead}"
                own += " --rollout_timeout 60"
                own += f" --rollout_engine vllm_server --vllm_servers @{files.start.parent / _ADDRESSES}"
            own += " --actor_lora_dim 4 --critic_lora_dim 2" if self.lora else ""
        else:
            own = (
                f"--max_seq_len 100 --zero_stage {self.stage} --dropout 0.1 --per_device_train_batch_size 2 "
                "--learning_rate 1e-3"
            )
            own += " --lora_dim 4 --lora_learning_rate 2e-3 --weight_decay 0.1" if self.lora else ""
        return [*shared.split(), *own.split()]


# The comparison, and the plan of the moments.


def moments(case: Case, kills: int, parts: dict[str, list[float]], dice: random.Random) -> list[Moment]:
    """The first few fall into the data build, the last into the writing of the model, the others anywhere between."""
    inside = ["step", "update", "save", "evaluation", "restore"] + (["rollout"] * 2 if case.rolls_out else [])
    building = max(1, kills // 8)
    chosen = ["data"] * building + [inside[place % len(inside)] for place in range(kills - building - 1)] + ["model"]
    middle = chosen[building:-1]
    dice.shuffle(middle)
    plan = []
    for part in [*chosen[:building], *middle, chosen[-1]]:
        often = part in ("step", "update", "rollout")
        durations = parts.get(part) or [0.05]
        longest = sorted(durations)[len(durations) // 2]
        plan.append(Moment(part, dice.randint(1, 4) if often else 1, dice.uniform(0.0, longest)))
    return plan


def differences(unbroken: Path, resumed: Path) -> list[str]:
    """What a run that was stopped left otherwise than the one that was not."""
    from safetensors.torch import load_file

    from tests.end_to_end.compared import figures

    told = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (unbroken / name).exists() and figures(unbroken, name) != figures(resumed, name):
            told.append(name)
    if (unbroken / ROLLOUTS).exists():
        told += [] if _drawn(unbroken) == _drawn(resumed) else [ROLLOUTS]
        accounts = rollout_account(read_rollouts(resumed))
        told += [each.sentence() for each in accounts if not each.is_whole]
    one, two = (_tensors(folder.with_name(f"rollouts_{folder.name}")) for folder in (unbroken, resumed))
    if one.keys() != two.keys() or not all(one[name].equal(two[name]) for name in one):
        told.append("rollouts")
    for model in sorted(path.parent.relative_to(unbroken) for path in unbroken.glob("*/model.safetensors")):
        mine, other = (load_file(folder / model / "model.safetensors") for folder in (unbroken, resumed))
        if mine.keys() != other.keys() or not all(mine[name].equal(other[name]) for name in mine):
            told.append(str(model))
    return told


def _drawn(folder: Path) -> list[dict[str, Any]]:
    clock = ("asked", "began", "ended", "servers", "waited", "trained")
    return [{name: own for name, own in line.items() if name not in clock} for line in read_rollouts(folder)]


def _tensors(folder: Path) -> dict[str, Any]:
    """Of every file of dumped rollouts; none where there is no folder."""
    from safetensors.torch import load_file

    paths = sorted(folder.glob("*.safetensors"))
    return {f"{path.name} {name}": tensor for path in paths for name, tensor in load_file(path).items()}


@dataclass(frozen=True)
class Outcome:
    """What became of a trial. hits: how often it was ended in each part of a run."""

    case: Case
    hits: dict[str, int]
    starts: int
    problems: list[str]
    seconds: float

    def line(self) -> str:
        case = self.case
        hits = ", ".join(f"{part} {count}" for part, count in sorted(self.hits.items()))
        verdict = "identical" if not self.problems else "DIFFERS: " + "; ".join(self.problems)
        name = case.program + (" LoRA" if case.lora else "") + (" offload" if case.offload else "")
        return (
            f"| {name} | {case.ranks} | {case.stage} | {sum(self.hits.values())} ({hits}) | {self.starts} | {verdict} "
            f"| {self.seconds:.0f} s |"
        )


def tried(trial: Trial, files: Files, place: Path, steps: int, seed: int) -> Outcome:
    """The unbroken run, the one that is ended again and again, and how they compare."""
    started = time.monotonic()
    case, number = trial.case, trial.number
    root = place / case.name
    root.mkdir(parents=True)
    flags = case.flags(files, steps, every=2 if steps > 10 else 1)

    def folders(name: str, of: str | None = None) -> list[str]:
        """of: the run whose schedule this one repeats, where timing decides."""
        own = ["--output_dir", str(root / name), "--data_output_path", str(root / f"cache_{name}")]
        if case.is_free:
            return own if of is None else [*own, "--replay_schedule", str(root / of / ROLLOUTS)]
        return [*own, "--rollout_dump", str(root / f"rollouts_{name}")] if case.rolls_out else own

    whole = run(case.program, case.ranks, [*flags, *folders("unbroken")], root / "unbroken.txt", None, number)
    if any(whole.codes):
        return Outcome(case, {}, 1, [f"codes {whole.codes}: {whole.said[-1500:]}"], time.monotonic() - started)
    hits: dict[str, int] = {}
    problems: list[str] = []
    for number_of_run in range(1, trial.repeats):
        name = f"repeated_{number_of_run}"
        repeated = run(case.program, case.ranks, [*flags, *folders(name, "unbroken")], root / f"{name}.txt")
        if any(repeated.codes):
            problems.append(f"{name}: codes {repeated.codes}: {repeated.said[-1500:]}")
        else:
            problems += [f"{name}: {what}" for what in differences(root / "unbroken", root / name)]
    again = [*flags, *folders("stopped"), "--resume"]
    starts = 0
    dice = random.Random(f"{seed} {case.name}")
    for moment in moments(case, trial.kills, whole.parts, dice):
        starts += 1
        ended = run(case.program, case.ranks, again, root / f"stopped_{starts}.txt", moment, number)
        if ended.hit:
            hits[moment.part] = hits.get(moment.part, 0) + 1
        problems += _problems(ended, moment, number)
        if problems or (root / "stopped" / "summary.json").exists():
            break
    if not problems and not (root / "stopped" / "summary.json").exists():
        starts += 1
        last = run(case.program, case.ranks, again, root / "stopped_last.txt", None, number)
        problems += [f"the last start ended with {last.codes}: {last.said[-1500:]}"] if any(last.codes) else []
    unbroken = "unbroken"
    if not problems and case.is_free:
        unbroken = "repeated_stopped"
        repeated = run(case.program, case.ranks, [*flags, *folders(unbroken, "stopped")], root / f"{unbroken}.txt")
        problems += [f"{unbroken}: codes {repeated.codes}: {repeated.said[-1500:]}"] if any(repeated.codes) else []
    if not problems:
        problems = differences(root / unbroken, root / "stopped")
    return Outcome(case, hits, starts, problems, time.monotonic() - started)


def _problems(ended: Ended, moment: Moment, number: int) -> list[str]:
    """How a run may not end. A signal that asks ends the run with code 0 once its loop has begun."""
    if number == signal.SIGKILL:
        fine = ended.hit and set(ended.codes) <= {-signal.SIGKILL, 0}
    else:  # before the loop and after it a signal ends a rank as usual, and the others with it
        fine = -number in ended.codes and moment.part in ("data", "restore", "model")
    fine = fine or not any(ended.codes)
    return [] if fine else [f"{moment}: codes {ended.codes}: {ended.said[-1500:]}"]


@dataclass(frozen=True)
class Trial:
    """A case, how often it is ended, and by which signal; repeats: runs that are not. servers: its rollout servers that
    are killed and started again, and those that are killed for good."""

    case: Case
    kills: int
    number: int
    repeats: int = 1
    servers: tuple[int, int] = (0, 0)


def servers_of(trial: Trial, files: Files, place: Path, delay_seconds: float) -> AbstractContextManager[None]:
    """The rollout servers of a trial, which are killed once its first run has ended."""
    if not trial.case.by_servers:
        return nullcontext()
    own = importlib.import_module("threestep.plugins.vllm.tests.rollout_server_processes")  # not there without it
    disturbance = own.Disturbance(place / trial.case.name / "unbroken" / "summary.json", *trial.servers, delay_seconds)
    return own.server_processes(files.start.parent / _ADDRESSES, disturbance)


# In the suite: each trainer, and conversations with a head's guesses; each stage, one rank and two, adapters, SIGTERM.
SHORT = (
    Trial(Case("sft", 2, 2), 3, signal.SIGKILL),
    Trial(Case("reward", 1, 3, lora=True, offload=True), 3, signal.SIGKILL),
    Trial(Case("dpo", 1, 0), 3, signal.SIGTERM),
    Trial(Case("ppo", 1, 0), 5, signal.SIGKILL),
    Trial(Case("acting_mtp", 2, 0), 2, signal.SIGKILL, repeats=2),
)
SHORT_STEPS = 4


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 2, 3])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--server_kills", type=int, default=0)
    parser.add_argument("--dead_servers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=240, help="of the data; 3,336 are 1,000 prompts of an epoch")
    parser.add_argument("--prompts", type=int, default=2, help="of a rollout of a rank, without environments")
    parser.add_argument("--ahead", type=int, default=1, help="steps, of the program servers")
    parser.add_argument("--delay", type=float, default=0.3, help="seconds; in the trials of the suite a tenth")
    parser.add_argument("--signal", choices=("SIGKILL", "SIGTERM"), default="SIGKILL")
    parser.add_argument("--short", action="store_true", help="the few trials of the suite, in place of those asked for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", type=Path, help="an empty folder that is kept; default: a temporary one")
    asked = parser.parse_args(argv)
    import_everything()
    number = getattr(signal, asked.signal)
    trials = SHORT if asked.short else tuple(
        Trial(
            Case(program, ranks, stage, asked.lora, asked.offload, asked.prompts, asked.ahead),
            asked.kills, number, asked.repeats, (asked.server_kills, asked.dead_servers),
        )
        for ranks in asked.ranks
        for stage in asked.stages
        for program in asked.programs
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kill_and_resume_") as temporary:
        place = asked.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        delay_seconds = asked.delay / 10 if asked.short else asked.delay
        files = make_files(place, rows=60 if asked.short else asked.rows, delay_seconds=delay_seconds)
        failed = False
        for trial in trials:
            with servers_of(trial, files, place, delay_seconds):
                outcome = tried(trial, files, place, SHORT_STEPS if asked.short else asked.steps, asked.seed)
            failed = failed or bool(outcome.problems)
            print(outcome.line(), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
