"""Settings drawn at random whose flags are left to `auto`: each is run so, again with what was chosen written out, and
once more from its first checkpoint; the models have to be the same to the bit, and the resumed run to choose alike.

    python -m tests.auto_settings 2                40 settings under seed 2
    python -m tests.auto_settings 2 --count 4      fewer

A line is printed for each setting: what was chosen, and whether the three runs agree. A setting that is refused in a
sentence is drawn anew. The exit code is 1 where a run fails or differs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.random_settings import Places, drawn_setting, make_places
from tests.support.forked_runs import import_everything, run

CHOSEN = ("reuse_forwards", "reuse_values", "share_beginnings", "speculate_by", "head_chunk_mb", "cpu_products")
BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")
_FREE_BYTES = (3e6, 1e7, 3e7, 1e11)  # that a run finds; the resumed one finds others
_SYSTEM = "Human: Sort these words, each of them once, and nothing else: fig apple quince plum cherry lemon fig plum. "
_REDRAWS = 100


def drawn(dice: random.Random, places: Places, of_step_3: bool) -> tuple[str, int, list[str]]:
    """Return a program, the number of its ranks and its flags, none of which is of CHOSEN."""
    if of_step_3:
        setting = drawn_setting(dice, places)
        _, ranks, own = dice.choice(setting.layouts)
        words = [*setting.flags, *own]
        for flag in {"--reuse_forwards", "--reuse_values"} & {*words}:
            place = words.index(flag)
            del words[place : place + 2]
        words += ["--speculate", "1"] if dice.random() < 0.2 else []
        return "ppo", ranks, [*words, "--adam_epsilon", "1e-8"]
    program, ranks, rows = (
        dice.choice(["sft", "reward", "dpo"]),
        dice.choice([1, 1, 2]),
        dice.choice([2, 4, "auto", "auto"]),
    )
    data = dice.choice([places.files.pairs, _long_beginnings(places)])
    split = {"sft": "1,0,0"}.get(program, "0,1,0")
    flags = (
        f"--model_name_or_path {places.files.start} --data_path jsonl:{data} --data_split {split} --dtype fp32 "
        f"--max_train_steps 2 --max_eval_rows 4 --max_seq_len 128 --report false --report_samples 0 --report_mfu false "
        f"--seed {dice.randint(1, 10**6)} --per_device_train_batch_size {rows} --gradient_accumulation_steps "
        f"{dice.choice([1, 2])} --zero_stage {dice.randint(0, 3)} --padded {dice.choice(['true', 'false', 'false'])}"
    ).split()
    if program == "sft" and dice.random() < 0.3:
        flags += ["--neftune_alpha", "5"]
    if program == "reward" and dice.random() < 0.3:
        flags += ["--loss_from", "first_difference"]
    return program, ranks, flags


def _long_beginnings(places: Places) -> Path:
    """Rows that begin alike."""
    path = places.files.pairs.with_name("begin_alike.jsonl")
    if not path.exists():
        rows = [json.loads(line) for line in places.files.pairs.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "prompt": _SYSTEM + row["prompt"]}) + "\n" for row in rows))
    return path


def tried(
    program: str, ranks: int, flags: Sequence[str], place: Path, *, free_bytes: Sequence[float]
) -> tuple[str, dict[str, Any]]:
    """Run a setting three times; return what is wrong, "" for nothing, and what was chosen. A refusal begins with
    `refused`. free_bytes: that the first run finds, and the two others"""
    import yaml

    common = [*flags, "--data_output_path", str(place.parent / "cache"), "--save_every", "1", "--keep_last", "0"]

    def ran(name: str, *more: str) -> str:
        words, free = [*common, *more, "--output_dir", str(place / name)], int(free_bytes[name != "auto"])
        done = run(program, ranks, words, place / f"{name}.txt", prepare=lambda rank: _find_free(free))
        if not any(done.codes):
            return ""
        said = [line for line in done.said.splitlines() if line.startswith("error: ")]
        is_sentence = set(done.codes) <= {2} and said and "Traceback" not in done.said
        return f"refused: {said[0]}" if is_sentence else f"{name} ended with {done.codes}: {done.said[-2500:]}"

    def chosen_in(name: str) -> dict[str, Any]:
        settings = yaml.safe_load((place / name / "config.yaml").read_text())
        names = [*CHOSEN, *(BATCHES if BATCHES[0] in settings else ())]
        return {flag: settings[flag] for flag in names if settings.get(flag) is not None}

    if problem := ran("auto"):
        return problem, {}
    chosen = chosen_in("auto")
    written = [word for name, value in chosen.items() for word in (f"--{name}", str(value).lower())]
    shutil.copytree(place / "auto", place / "resumed")
    found = sorted((place / "resumed" / "checkpoints").glob("step_*"))
    if not found:
        return "refused: a run of one step, which leaves no checkpoint", chosen
    for name, more in (("explicit", written), ("resumed", ["--resume", str(found[0])])):
        if problem := ran(name, *more):
            return f"not as auto: {problem}", chosen
        if chosen_in(name) != chosen:
            return f"{name} chose {chosen_in(name)}", chosen
        for model in ("model", "critic"):
            weights = [place / run_name / model / "model.safetensors" for run_name in ("auto", name)]
            if weights[0].exists() and weights[0].read_bytes() != weights[1].read_bytes():
                return f"{name}: other weights of {model}", chosen
    return "", chosen


def _find_free(free: int) -> None:
    from training.utils.setup import setup

    setup.free_bytes = lambda *given: free


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first setting's number")
    parser.add_argument("--place", type=Path, help="an empty folder that is kept; default: a temporary one")
    asked = parser.parse_args(argv)
    import_everything()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="auto_settings_") as temporary:
        place = asked.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        places = make_places(place)
        for number in range(asked.first, asked.count):
            for redraw in range(_REDRAWS):
                dice = random.Random(f"{asked.seed} {number} {redraw}")
                program, ranks, flags = drawn(dice, places, of_step_3=number % 2 == 0)
                root = place / f"setting_{number}"
                shutil.rmtree(root, ignore_errors=True)
                root.mkdir()
                free_bytes = dice.sample(_FREE_BYTES, 2)
                problem, chosen = tried(program, ranks, flags, root, free_bytes=free_bytes)
                if not problem.startswith("refused"):
                    break
            print(f"| {number} | {program}, {ranks} | {chosen} | {problem or 'the same bits'} |", flush=True)
            if problem:
                wrong += 1
                print(" ".join(flags), flush=True)
            else:
                shutil.rmtree(root)
    print(f"seed {asked.seed}: {wrong} of {asked.count - asked.first} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
