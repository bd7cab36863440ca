"""The report's section "Is the reward being gamed?" on rewards that are gameable on purpose, and on honest ones.

    python -m benchmarks.gamed_rewards --model runs/quickstart/step1_sft/model [--seeds 1 2 3] [--rewards longer exact]
    python -m benchmarks.gamed_rewards --table            of the runs that are done

Trains GRPO on the embedded task with each reward of `benchmarks.gameable` for 20 rollouts, with the task's checker held
out, and evaluates every five. FOLDER/results.jsonl gets a line for each run: by evaluation the signs that the section
and the log show, and those without the checker, which leave the surface features alone. FOLDER/pages has the reports.
A run that has its line is not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forked import run_in_fork, step3
from benchmarks.gameable import GAMEABLE, HONEST
from benchmarks.mismatch_stress import FLAGS, import_all
from threestep.plugins.report.figures.gaming_figures import gaming_of
from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.gaming.account import account_of
from threestep.plugins.report.gaming.sentences import signs_of_gaming
from threestep.plugins.report.gaming.values import Values, values_of
from threestep.plugins.report.writing import write_report

REWARDS = (*GAMEABLE, *HONEST)
_FILE = Path(__file__).with_name("gameable.py")


class GamedRun(NamedTuple):
    """One training run. reward: a function of `benchmarks.gameable`."""

    seed: int
    reward: str


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart/step1_sft/model", help="the quickstart's SFT model")
    parser.add_argument("--folder", type=Path, default=Path("runs/gamed_rewards"), help="of results.jsonl and pages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS), choices=REWARDS)
    parser.add_argument("--steps", type=int, default=20, help="rollouts, each with one optimizer step")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--table", action="store_true", help="make no runs")
    given = parser.parse_args(argv)
    results = given.folder / "results.jsonl"
    if not given.table:
        (given.folder / "pages").mkdir(parents=True, exist_ok=True)
        done = {run for run, _ in _read(results)}
        for run in (GamedRun(seed, reward) for seed in given.seeds for reward in given.rewards):
            if run not in done:
                print(*run, flush=True)
                line = _made(run, given)
                with results.open("a") as lines:
                    lines.write(json.dumps(line) + "\n")
    print(table(_read(results)))


def _made(run: GamedRun, given: argparse.Namespace) -> dict[str, Any]:
    """Train, write the page, and return the signs. SystemExit, with the end of its log, where it fails."""
    name = f"{run.reward}_{run.seed}"
    out, log = given.folder / name, given.folder / f"{name}.log"
    shutil.rmtree(out, ignore_errors=True)
    words = [
        *FLAGS, "--reward", f"{_FILE}:{run.reward}", "--kl_coef", 0.02, "--max_train_steps", given.steps,
        "--eval_interval", 5, "--val_samples", 1, "--actor_learning_rate", given.learning_rate,
        "--actor_model_name_or_path", Path(given.model).resolve(), "--output_dir", out,
        "--data_output_path", given.folder / "cache", "--seed", run.seed,
    ]  # fmt: skip
    import_all()
    run_in_fork(name, step3(words), log)
    write_report([out], given.folder / "pages" / f"{name}.html")
    line = {**run._asdict(), **signs_in(out), "steps": given.steps, "learning_rate": given.learning_rate}
    shutil.rmtree(out)
    return line


def signs_in(folder: Path) -> dict[str, Any]:
    """Return the signs of a run by evaluation, with the checker and without it, and the last account's figures."""
    samples: dict[int, list[dict[str, Any]]] = {}
    for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        samples.setdefault(sample["step"], []).append(sample)
    first, *later = sorted(samples)
    [step] = read_runs([folder])[0].steps
    shown = gaming_of(step)
    assert shown is not None, "the run has two evaluations"
    values = values_of(str(step.settings["reward"]), str(step.settings["checker"]))
    found: dict[str, Any] = {"signs": {}, "without_checker": {}}
    for at in later:
        for name, own in (("signs", values), ("without_checker", replace_held_out(values))):
            account = account_of(samples[first], samples[at], own)
            assert account is not None, "its samples have scores"
            found[name][at] = signs_of_gaming(account)
    account = shown.account
    drifts = {drift.name: (drift.before, drift.after, drift.error) for drift in account.drifts}
    return {**found, "page": list(shown.signs), "drifts": drifts, "explained": account.explained, "kl": shown.kl}


def replace_held_out(values: Values) -> Values:
    """The values without those that are held out."""
    return values._replace(held_out=())


def _read(results: Path) -> list[tuple[GamedRun, dict[str, Any]]]:
    lines = results.read_text().splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    return [(GamedRun(each["seed"], each["reward"]), each) for each in found]


def table(found: Sequence[tuple[GamedRun, dict[str, Any]]]) -> str:
    """Return a row for each run: the changes, the share explained, the first evaluation with a sign, and on the
    page."""
    lines = [
        "| reward | seed | score | checker | KL | explained | first sign | on the page | without the checker |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run, each in sorted(found, key=lambda pair: (REWARDS.index(pair[0].reward), pair[0].seed)):
        score, check = ("{:.3f} → {:.3f} (± {:.3f})".format(*each["drifts"][name]) for name in ("reward", "check"))
        explained = "–" if each["explained"] is None else f"{each['explained']:.0%}"
        kl = "–" if each["kl"] is None else f"{each['kl']:.2f}"
        cells = [run.reward, str(run.seed), score, check, kl, explained, _first(each["signs"])]
        lines.append(f"| {' | '.join([*cells, 'yes' if each['page'] else 'no', _first(each['without_checker'])])} |")
    return "\n".join(lines)


def _first(signs: dict[str, list[str]]) -> str:
    return next((str(at) for at, sentences in signs.items() if sentences), "none")


if __name__ == "__main__":
    main()
