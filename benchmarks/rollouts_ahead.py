"""The cost and the gain of drawing rollouts ahead of training (`--rollouts_ahead K`).

    python -m benchmarks.rollouts_ahead --model runs/quickstart/step1_sft/model [--seeds 1 2 3] [--ahead 0 1 2 free]
    python -m benchmarks.rollouts_ahead --table           of the runs that are done
    python -m benchmarks.rollouts_ahead --simulate        throughput and waiting, without a model

The first trains GRPO on the embedded task, as `mismatch_stress` does, with each K and, above 0, with and without the
correction: the checker's score on held-out prompts says what older weights cost. A run ends with a line in
FOLDER/results.jsonl; one that is there already is not made again.

The second simulates a trainer and 1 to 64 servers. A step draws `--responses` responses; each takes a time in
proportion to its length, drawn from a distribution of lengths; a server draws `--slots` at a time, and the weights of
step s - 1 - K draw step s. Servers take new weights together, when all have drawn the step before, as in the queue of
step 3; or, in a second table, each by itself, when it has drawn its own part. With `free` a group of `--group`
responses has one version, and a step takes the groups that ended first, as `ahead.admission` lets it. Servers that take
new weights together begin no group until those that are begun have ended, as `ahead.held` has it; in the second table a
slot that is free begins the next response at once. A step of training takes the time in which all slots would draw a
step if none of them ever waited. It measures the order of the queue, and no machine.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import math
import random
import shutil
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.forked import run_in_fork, step3
from benchmarks.mismatch_stress import FLAGS, import_all
from threestep.plugins.ahead.admission import Admission
from threestep.plugins.ahead.free import GROUPS_ELSEWHERE

LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "equal": lambda dice: 1.0,
    "uniform": lambda dice: dice.uniform(0.0, 2.0),
    "exponential": lambda dice: dice.expovariate(1.0),
    "log-normal": lambda dice: math.exp(dice.gauss(-0.5, 1.0)),  # a mean of 1, and a long tail
}


class Run(NamedTuple):
    """One training run. ahead: K, or free. correction: of --mismatch_correction."""

    seed: int
    ahead: str
    correction: str


def main(argv: Sequence[str] | None = None) -> None:
    """Make the runs that are missing and print their table, or simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart/step1_sft/model", help="the quickstart's SFT model")
    parser.add_argument("--folder", type=Path, default=Path("runs/rollouts_ahead"), help="of results.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ahead", nargs="+", default=["0", "1", "2", "free"])
    parser.add_argument("--corrections", nargs="+", default=["truncate", "none"], help="of K above 0 and free")
    parser.add_argument("--steps", type=int, default=24, help="rollouts, each with one optimizer step")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--table", action="store_true", help="make no runs")
    parser.add_argument("--simulate", action="store_true", help="train nothing")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--responses", type=int, default=1024, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt; of free")
    parser.add_argument("--slots", type=int, default=16, help="responses that a server draws at a time")
    given = parser.parse_args(argv)
    if given.simulate:
        for together in (True, False):
            print(f"servers take new weights {'together' if together else 'each by itself'}\n")
            print(f"{simulated_table(given, together)}\n")
        return
    results = given.folder / "results.jsonl"
    if not given.table:
        _make_missing(given, results)
    print(table(_read(results)))


# Training runs.


def _make_missing(given: argparse.Namespace, results: Path) -> None:
    given.folder.mkdir(parents=True, exist_ok=True)
    done = {run for run, _ in _read(results)}
    for seed in given.seeds:
        for ahead in given.ahead:
            for correction in given.corrections if ahead != "0" else ["none"]:
                run = Run(seed, ahead, correction)
                if run not in done:
                    print(*run, flush=True)
                    line = _made(run, given)
                    with results.open("a") as lines:
                        lines.write(json.dumps(line) + "\n")


def _made(run: Run, given: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the scores. SystemExit, with the end of its log, where it fails."""
    out = given.folder / "_".join(map(str, run))
    shutil.rmtree(out, ignore_errors=True)
    log = given.folder / f"{out.name}.log"
    words = [
        *FLAGS, "--max_train_steps", given.steps, "--actor_learning_rate", given.learning_rate,
        "--actor_model_name_or_path", Path(given.model).resolve(), "--output_dir", out,
        "--data_output_path", given.folder / "cache", "--seed", run.seed, "--rollouts_ahead", run.ahead,
        "--mismatch_correction", run.correction,
    ]  # fmt: skip
    import_all()
    run_in_fork(out.name, step3(words), log)
    summary = json.loads((out / "summary.json").read_text())
    shutil.rmtree(out)
    log.unlink()
    return {**run._asdict(), **summary, "steps": given.steps, "learning_rate": given.learning_rate}


def _read(results: Path) -> list[tuple[Run, dict[str, Any]]]:
    lines = results.read_text().splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    return [(Run(each["seed"], str(each["ahead"]), each["correction"]), each) for each in found]


def table(found: Sequence[tuple[Run, dict[str, Any]]]) -> str:
    """Return the checker's score after training: the mean over seeds, its standard error, each seed's in brackets."""
    lines = ["| K | correction | after training | difference to K = 0 |", "| --- | --- | --- | --- |"]
    base = {run.seed: each["checker_after"] for run, each in found if run.ahead == "0"}
    for ahead, correction in dict.fromkeys((run.ahead, run.correction) for run, _ in found):
        scores = {run.seed: each["checker_after"] for run, each in found if run[1:] == (ahead, correction)}
        gains = [score - base[seed] for seed, score in scores.items() if seed in base]
        each = ", ".join(f"{scores[seed]:.3f}" for seed in sorted(scores))
        gain = f"{statistics.mean(gains):+.3f} ± {_error(gains):.3f}" if ahead != "0" and gains else ""
        mean = f"{statistics.mean(scores.values()):.3f} ± {_error(list(scores.values())):.3f}"
        named = correction if ahead != "0" else ""
        lines.append(f"| {ahead} | {named} | {mean} ({each}) | {gain} |")
    return "\n".join(lines)


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


# The simulation.


class Simulated(NamedTuple):
    """rate: steps a second, as a share of those of training that never waits. trainer, servers: shares of their time in
    which they wait; of servers also slots that the last long responses leave empty."""

    rate: float
    trainer: float
    servers: float


def simulated(
    ahead: int, lengths: Sequence[Sequence[float]], shape: tuple[int, int], training_seconds: float, *, together: bool
) -> Simulated:
    """Return the rate and the waiting of a run. lengths: seconds of each response, by step. shape: servers, and slots
    of each. together: servers take new weights together."""
    servers, slots = shape
    free = [0.0] * servers  # when each server has drawn its part of the step before
    ready: list[float] = []  # when each step's rollouts are drawn
    trained: list[float] = []  # when each step has trained
    waited = busy = 0.0
    for step, responses in enumerate(lengths, start=1):
        version = max(step - 1 - ahead, 0)
        weights = trained[version - 1] if version else 0.0
        begin = [max(weights, max(free) if together else own) for own in free]  # a server holds one version at a time
        free = _drawn(responses, begin, slots)
        ready.append(max(free))
        busy += sum(responses)
        idle_since = trained[-1] if trained else 0.0
        start = max(idle_since, ready[-1])
        waited += start - idle_since
        trained.append(start + training_seconds)
    total = trained[-1]
    rate = len(lengths) * training_seconds / total
    return Simulated(rate, waited / total, 1.0 - busy / (total * servers * slots))


def simulated_free(
    oldest: int, lengths: Sequence[Sequence[float]], slots: int, training_seconds: float, *, group: int
) -> Simulated:
    """Return the rate and the waiting where a step takes groups as they end. oldest: of weights, in steps. slots: of
    all servers. group: responses of a group."""
    responses = [seconds for step in lengths for seconds in step]
    admission = Admission(oldest, len(lengths[0]) // group, len(lengths))
    free = [0.0] * slots
    takes: list[float] = []  # when each step begins
    pending: list[tuple[float, float]] = []  # of each group: when its first response begins, and its last one ends
    trained = waited = 0.0
    begun = 0
    for step in range(1, len(lengths) + 1):
        takes.append(trained)
        for number in range(begun, admission.admitted(step)):
            spans = [_span(free, seconds, trained) for seconds in responses[number * group : (number + 1) * group]]
            pending.append((min(begin for begin, _ in spans), max(end for _, end in spans)))
        begun = admission.admitted(step)
        pending.sort(key=lambda each: each[1])
        places, start = _first_batch(admission, step, takes, pending)
        waited += start - trained
        pending = [each for place, each in enumerate(pending) if place not in places]
        trained = start + training_seconds
    return Simulated(
        len(lengths) * training_seconds / trained, waited / trained, 1.0 - sum(responses) / (trained * slots)
    )


def simulated_held(
    oldest: int,
    lengths: Sequence[Sequence[float]],
    slots: int,
    training_seconds: float,
    *,
    group: int,
    at_once: int = GROUPS_ELSEWHERE,
) -> Simulated:
    """As `simulated_free`, of servers that hold one version for all groups that are begun. at_once: groups that are."""
    queue = _HeldQueue(slots, at_once)
    groups = [seconds for step in lengths for seconds in _in_groups(step, group)]
    admission = Admission(oldest, len(lengths[0]) // group, len(lengths))
    trained = waited = 0.0
    begun = 0
    for step in range(1, len(lengths) + 1):
        queue.waiting += groups[begun : admission.admitted(step)]
        begun, queue.newest, start = admission.admitted(step), step - 1, trained
        queue.begin(start)
        while (places := queue.taken(admission, step)) is None:
            start = queue.advance()
        queue.ended = [version for place, version in enumerate(queue.ended) if place not in set(places)]
        waited += start - trained
        trained = start + training_seconds
        while queue.drawing and queue.drawing[0][0] <= trained:
            queue.advance()
    busy = sum(map(sum, lengths))
    return Simulated(len(lengths) * training_seconds / trained, waited / trained, 1.0 - busy / (trained * slots))


class _HeldQueue:
    """waiting: the seconds of each response of groups to be begun. drawing: end and version of groups. ended: the
    versions of those that no step has taken. newest: version."""

    def __init__(self, slots: int, at_once: int) -> None:
        self._free, self._at_once = [0.0] * slots, at_once
        self.waiting: list[Sequence[float]] = []
        self.drawing: list[tuple[float, int]] = []
        self.ended: list[int] = []
        self.newest = 0

    def begin(self, now: float) -> None:
        """Begin the groups that may be begun now."""
        while self.waiting and len(self.drawing) < self._at_once and all(own == self.newest for _, own in self.drawing):
            end = max(_span(self._free, seconds, now)[1] for seconds in self.waiting.pop(0))
            heapq.heappush(self.drawing, (end, self.newest))

    def advance(self) -> float:
        """Let the next group end; return when it does."""
        end, version = heapq.heappop(self.drawing)
        self.ended.append(version)
        self.begin(end)
        return end

    def taken(self, admission: Admission, step: int) -> list[int] | None:
        others = [version for _, version in self.drawing] + [self.newest] * len(self.waiting)
        return admission.taken(step, self.ended, others)


def _in_groups(responses: Sequence[float], group: int) -> list[Sequence[float]]:
    return [responses[first : first + group] for first in range(0, len(responses), group)]


def _span(free: list[float], seconds: float, earliest: float) -> tuple[float, float]:
    """Draw a response in the slot that is free first; return when it begins and ends."""
    begin = max(free[0], earliest)
    heapq.heapreplace(free, begin + seconds)
    return begin, begin + seconds


def _first_batch(
    admission: Admission, step: int, takes: Sequence[float], pending: Sequence[tuple[float, float]]
) -> tuple[set[int], float]:
    """Return the places of the groups that `step` takes, and when it does. takes: when each step so far began."""
    versions = [min(bisect.bisect_right(takes, begin), step) - 1 for begin, _ in pending]
    ends = [end for _, end in pending]

    def taken(count: int) -> list[int] | None:
        return admission.taken(step, versions[:count], versions[count:])

    fewest, most = bisect.bisect_right(ends, takes[-1]), len(pending)
    if taken(fewest) is None:
        most = bisect.bisect_left(range(most + 1), True, lo=fewest, key=lambda count: taken(count) is not None)
    else:
        most = fewest
    return set(taken(most) or ()), max(takes[-1], ends[most - 1])


def _drawn(responses: Sequence[float], begin: Sequence[float], slots: int) -> list[float]:
    """Return when each server has drawn its last response; each is begun in the slot that is free first."""
    free = [(time, server) for server, time in enumerate(begin) for _ in range(slots)]
    heapq.heapify(free)
    ends = list(begin)
    for seconds in responses:
        time, server = free[0]
        heapq.heapreplace(free, (time + seconds, server))
        ends[server] = max(ends[server], time + seconds)
    return ends


def simulated_table(given: argparse.Namespace, together: bool, steps: int = 60) -> str:
    """Return a row for each distribution and number of servers: the rate of each K and of free, with the shares of
    their time that the trainer and the slots wait."""
    ages, oldest = range(5), (1, 2, 4)
    names = [f"K = {ahead}" for ahead in ages] + [f"free, at most {age} old" for age in oldest]
    lines = ["| lengths | servers | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names)]
    for name, draw in LENGTHS.items():
        for servers in given.servers:
            dice = random.Random(f"{name} {servers}")
            lengths = [[draw(dice) for _ in range(given.responses)] for _ in range(steps)]
            shape, training = (servers, given.slots), given.responses / (servers * given.slots)
            cells = [simulated(ahead, lengths, shape, training, together=together) for ahead in ages]
            slots, group = math.prod(shape), given.group
            at_once = max(GROUPS_ELSEWHERE, slots // group)  # of so many ranks that they fill the slots
            of_free = partial(simulated_held, at_once=at_once) if together else simulated_free
            cells += [of_free(age, lengths, slots, training, group=group) for age in oldest]
            shown = " | ".join(f"{cell.rate:.2f} ({cell.trainer:.0%}, {cell.servers:.0%})" for cell in cells)
            lines.append(f"| {name} | {servers} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
