"""Malformed files, made by a seeded mutator from those of tiny runs, before every command that reads a file.

    python -m tests.malformed_files FOLDER [--cases 1000] [--seed 1] [--only audit]

A command may refuse a file, with code 2 and a sentence, or read what is left of it. It may not end with a traceback,
hang, or, damaged as the file is beyond reading, end as if nothing was wrong. `audit` ends with code 1 where it names a
difference, and never otherwise. Each case is run in this process; FOLDER gets the runs, once.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import yaml
from safetensors.numpy import load, save

from tests.end_to_end.conftest import run_step
from tests.support.kept_files import ReadingCommand, kept_commands, make_kept
from threestep.command import commands
from threestep.plugins.distillation.file import read_table
from threestep.plugins.judges.verdicts import Verdicts
from threestep.plugins.replay.files import _read
from threestep.plugins.replay.rollout_tensors import rollout_of
from threestep.plugins.tinker.store import Store
from training.utils.checkpoints.folder import _write_manifest
from training.utils.run import program

SECONDS = 60  # of one case: more is a hang
CRASHED, HUNG = "crash", "hang"
DIFFERS = ("the first wrong quantity is", "differs", "the first difference", "differ")


class Outcome(NamedTuple):
    """code: of the exit, or CRASHED or HUNG. said: on both streams."""

    code: int | str
    said: str


# --- one command in this process


def outcome(call: Callable[[], object]) -> Outcome:
    """Return how a program of ours ends whose main is `call`."""
    said, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _deadline():
            with mock.patch.object(sys, "argv", ["main"]):
                program._run(lambda _: call())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except TimeoutError:
        return Outcome(HUNG, said.getvalue())
    text = said.getvalue()
    return Outcome(CRASHED if "Traceback (most recent call last)" in text else code, text)


class _Hangs(BaseException):
    """No `except Exception` takes it."""


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    except _Hangs:
        raise TimeoutError from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problem_of(command: ReadingCommand, found: Outcome, beyond_reading: bool) -> str:
    """Return what is wrong with an outcome; empty if nothing is."""
    if found.code in (CRASHED, HUNG):
        return str(found.code)
    if found.code == 1 and command.compares:
        return "" if any(words in found.said for words in DIFFERS) else "code 1 without a difference"
    if found.code == 2:
        return "" if "error: " in found.said else "code 2 without a sentence"
    if found.code != 0:
        return f"code {found.code}"
    return "ends as if nothing was wrong" if beyond_reading and not command.skips else ""


# --- mutations

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 10**30, -(10**30), 2**63, 0.5, -0.5, math.nan, math.inf, -math.inf, 1e308, "", "²",
    "a", "x" * 300, "\ud800", "../..", "/dev/zero", [], {}, [[]], [None], {"": None}, ["a", 1], {"a": {"b": [1]}},
)  # fmt: skip
DEEP = "[" * 100_000


class Damage(NamedTuple):
    """what: in words. content: of the file; None: a folder stands in its place. beyond_reading: no reader can make
    sense of it."""

    what: str
    content: bytes | None
    beyond_reading: bool


def damaged(path: Path, dice: random.Random) -> Damage:
    """Return a file, damaged by the dice, by what its name says that it holds."""
    content = path.read_bytes()
    if dice.random() < 0.3:
        return _damaged_bytes(path, content, dice)
    kinds = {".json": _damaged_json, ".jsonl": _damaged_lines, ".yaml": _damaged_yaml, ".safetensors": _damaged_tensors}
    return kinds.get(path.suffix, _damaged_bytes_of)(content, dice)


def _damaged_bytes(path: Path, content: bytes, dice: random.Random) -> Damage:
    if dice.random() < 0.2:
        return Damage("a folder in its place", None, True)
    return _damaged_bytes_of(content, dice, whole=path.suffix in (".json", ".safetensors"))


def _damaged_bytes_of(content: bytes, dice: random.Random, whole: bool = False) -> Damage:
    """whole: a part of the file is not a file of the kind."""
    kind = dice.choice(["truncated", "empty", "deep", "not UTF-8", "flipped", "zeros", "a long number", "other"])
    if kind == "truncated":
        return Damage(kind, content[: dice.randrange(1, max(2, len(content) - 2))], whole)
    if kind == "flipped":
        place = dice.randrange(len(content)) if content else 0
        return Damage(kind, content[:place] + bytes([dice.randrange(256)]) + content[place + 1 :], False)
    made = {
        "empty": b"",
        "deep": DEEP.encode(),
        "not UTF-8": b"\xff\xfe{\x00" + content[:40],
        "zeros": bytes(200),
        "a long number": b"9" * 6000,
        "other": b"PK\x03\x04 some other file",
    }
    return Damage(kind, made[kind], whole)


def _damaged_value(value: Any, dice: random.Random) -> str:
    """Change one place of a JSON value; return where."""
    places = [*_places(value)]
    if not places:
        return "nothing"
    holder, key = dice.choice(places)
    kind = dice.choice(["replaced", "replaced", "replaced", "left out", "renamed", "twice"])
    name = f"{str(key)[:40]} {kind}"
    if kind == "replaced":
        holder[key] = copy.deepcopy(dice.choice(HOSTILE))
        return f"{name} by {str(holder[key])[:20]!r}"
    if kind == "left out":
        del holder[key]
    elif isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key) if kind == "renamed" else holder[key]
    else:
        holder.append(copy.deepcopy(holder[key]))
    return name


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _damaged_json(content: bytes, dice: random.Random) -> Damage:
    value = json.loads(content)
    if dice.random() < 0.1:
        other = dice.choice(HOSTILE)
        return Damage(f"whole {str(other)[:20]!r}", json.dumps(other).encode(), not isinstance(other, dict))
    what = _damaged_value(value, dice)
    return Damage(what, json.dumps(value).encode(), False)


def _damaged_lines(content: bytes, dice: random.Random) -> Damage:
    lines = content.splitlines()
    if not lines:
        return Damage("a line", b"{", False)
    place = dice.randrange(len(lines))
    kind = dice.choice(["value", "value", "value", "text", "left out", "twice"])
    if kind == "value":
        found = _damaged_json(lines[place], dice)
        kind, lines[place] = f"line {place + 1}: {found.what}", found.content or b""
    elif kind == "text":
        lines[place] = lines[place][: len(lines[place]) // 2]
    elif kind == "left out":
        del lines[place]
    else:
        lines.insert(place, lines[place])
    return Damage(kind, b"\n".join(lines) + b"\n", False)


def _damaged_yaml(content: bytes, dice: random.Random) -> Damage:
    if dice.random() < 0.2:
        text = dice.choice(["a: b: c", "- [", "&a [*a]", "!!python/object/apply:os.getcwd []", "{", "\t", "1", "[1]"])
        return Damage(text, text.encode(), False)
    value = yaml.safe_load(content)
    what = _damaged_value(value, dice)
    return Damage(what, yaml.safe_dump(value, allow_unicode=False).encode("utf-8", "surrogatepass"), False)


def _damaged_tensors(content: bytes, dice: random.Random) -> Damage:
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    notes = header.get("__metadata__")
    if dice.random() < 0.15:
        return _damaged_header(content, header, dice)
    if notes and dice.random() < 0.3:
        what = f"metadata: {_damaged_value(notes, dice)}"
        notes = {
            name.encode("utf-8", "replace").decode(): ascii(value)[1:-1]
            if isinstance(value, str)
            else json.dumps(value)
            for name, value in notes.items()
        }
        return Damage(what, save(tensors, notes), False)
    name = dice.choice([*tensors])
    value = tensors[name]
    kind = dice.choice(
        ["left out", "renamed", "type", "shorter", "longer", "flat", "empty", "number", "number", "numbers"]
    )
    if kind == "left out":
        del tensors[name]
    elif kind == "renamed":
        tensors[f"{name}x"] = tensors.pop(name)
    elif kind == "type":
        tensors[name] = value.astype(
            dice.choice([np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_, np.float16])
        )
    elif kind == "shorter":
        tensors[name] = value[:-1] if value.ndim else value.reshape(1)
    elif kind == "longer":
        tensors[name] = np.concatenate([value, value[-1:]]) if value.ndim else value.reshape(1)
    elif kind == "flat":
        tensors[name] = value.reshape(-1, 1)
    elif kind == "empty":
        tensors[name] = value.reshape(-1)[:0]
    else:
        tensors[name] = _other_numbers(value, dice, every=kind == "numbers")
    return Damage(
        f"{name} {kind}", save({key: np.ascontiguousarray(each) for key, each in tensors.items()}, notes), False
    )


def _other_numbers(value: np.ndarray, dice: random.Random, *, every: bool) -> np.ndarray:
    value = value.copy()
    flat = value.reshape(-1)
    if not flat.size:
        return value
    place: Any = slice(None) if every else dice.randrange(flat.size)
    if value.dtype.kind == "f":
        flat[place] = dice.choice([math.nan, math.inf, -math.inf, 0.0, 3e38, -3e38, 1e-45])
    elif value.dtype.kind == "b":
        flat[place] = dice.random() < 0.5
    else:
        flat[place] = dice.choice([-1, 0, 1, 2**31 - 1, np.iinfo(value.dtype).max, np.iinfo(value.dtype).min])
    return value


def _damaged_header(content: bytes, header: dict[str, Any], dice: random.Random) -> Damage:
    size = 8 + int.from_bytes(content[:8], "little")
    kind = dice.choice(["length", "header", "header"])
    if kind == "length":
        other = dice.choice([0, 1, size, 10**6, 2**63, 2**64 - 1])
        return Damage(f"header of {other}", other.to_bytes(8, "little") + content[8:], other != size - 8)
    what = _damaged_value(header, dice)
    text = json.dumps(header).encode()
    return Damage(f"header: {what}", len(text).to_bytes(8, "little") + text + content[size:], False)


# --- cases


@contextlib.contextmanager
def in_place_of(path: Path, content: bytes | None, aside: Path) -> Iterator[None]:
    """Inside, a file has other content; None: it is a folder. aside: where it is kept."""
    os.rename(path, aside)
    try:
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        yield
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.rename(aside, path)


class Case(NamedTuple):
    """words: the command, the file and the damage. problem: empty if there is none."""

    words: str
    problem: str
    found: Outcome


def cases_of(folder: Path, commands: Sequence[ReadingCommand], count: int, seed: int) -> Iterator[Case]:
    """Run so many cases, shared out among commands and their files; before them each command on whole files."""
    dice = random.Random(seed)
    for command in commands:
        found = outcome(command.call)
        whole = found.code == 0 or (found.code == 1 and command.compares)
        yield Case(f"{command.name}, whole files", "" if whole else f"code {found.code}", found)
    for number in range(count):
        command = commands[number % len(commands)]
        path = command.files[number // len(commands) % len(command.files)]
        damage = damaged(path, dice)
        with in_place_of(path, damage.content, folder / "aside"):
            found = outcome(command.call)
        words = f"{number}: {command.name}, {path.parent.name}/{path.name}: {damage.what}"
        yield Case(words, problem_of(command, found, damage.beyond_reading), found)


# --- tiny runs, and the commands that read them

STEPS: dict[str, int | str] = {"sft": 1, "reward": 2, "dpo": "dpo", "grpo": 3}
_SHAPE = "--vocab_size 300 --hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2"
_SHARED = (
    "--data_path embedded --max_seq_len 48 --max_train_rows 16 --max_eval_rows 2 --eval_interval 0 --dtype fp32 "
    "--record_steps 2 --max_train_steps 2 --record_values true --digests true"
)
_OF_SENTENCES = "--per_device_train_batch_size 4 --learning_rate 1e-3 --save_every 1"
_OF_ROLLOUTS = (
    "--max_answer_seq_len 8 --max_prompt_seq_len 40 --reward length --reward_length_characters 12 --advantage grpo "
    "--per_device_generation_batch_size 4 --num_samples_per_prompt 2 --actor_learning_rate 1e-3"
)


def make_runs(folder: Path, kinds: Sequence[str]) -> None:
    """Train for two steps of each kind, in a folder each, and write the other files that commands read."""
    from threestep.plugins.programs import new_model

    with contextlib.redirect_stdout(io.StringIO()):
        new_model.main(["--data_path", "embedded", "--out", str(folder / "start"), "--seed", "1", *_SHAPE.split()])
    for kind in kinds:
        model, own = "--model_name_or_path", _OF_SENTENCES.split()
        if kind == "grpo":
            model, own = "--actor_model_name_or_path", [*_OF_ROLLOUTS.split(), "--rollout_dump", folder / "dump"]
        places = [model, folder / "start", "--output_dir", folder / kind, "--data_output_path", folder / "cache"]
        ran = run_step(STEPS[kind], [*places, *_SHARED.split(), *own])
        assert ran.code == 0, ran.words
    shutil.copytree(folder / "sft", folder / "sft_again")
    _write_lines(folder / "held_out.jsonl", [
        {"prompt": "Human: a Assistant:", "response": " b"}, {"ids": [3, 4, 5], "begin": 1, "name": "x"},
    ])  # fmt: skip
    _write_lines(folder / "rows.jsonl", [
        {"prompt": f"Human: {word}? Assistant:", "chosen": f" {word}", "rejected": " no"}
        for word in ("fig", "pear", "apple", "plum")
    ])  # fmt: skip
    row = {"input_ids": [3, 4, 5, 6], "places": [1, 3], "top_ids": [[1, 2], [3, 4]], "rest_logprobs": [-3.0, -4.0]}
    _write_lines(folder / "teacher.jsonl", 3 * [{**row, "top_logprobs": [[-0.5, -1.0], [-0.7, -2.0]]}])
    verdict = {"value": 0.5, "reply": "x", "asked": {}, "requests": 1, "tokens": 3, "seconds": 0.1}
    _write_lines(folder / "verdicts" / "judge.rank0.jsonl", [{"key": f"k{place}", **verdict} for place in range(3)])
    Store(folder / "served", {"model": "m", "lora": "4"})
    make_kept(folder, with_rollouts="grpo" in kinds)


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def commands_of(folder: Path, kinds: Sequence[str]) -> list[ReadingCommand]:
    """Every command that reads a file, on the runs of `make_runs`."""
    sft, start, rows = folder / "sft", folder / "start", folder / "rows.jsonl"
    checkpoint, dump = sft / "checkpoints" / "step_000001", folder / "dump" / "rollout_000001_rank0.safetensors"
    described = [checkpoint / "models" / "model" / name for name in ("config.json", "weights.json", "tokenizer.json")]
    weights = checkpoint / "model" / "mp_rank_00_model_states.safetensors"
    served = folder / "served"
    record, out = sft / "records" / "step_000002", folder / "out"
    tokenizer = [start / "tokenizer.json", start / "tokenizer_config.json"]
    data = ["--data_path", f"jsonl:{rows}", "--data_output_path", folder / "cache"]
    held_out = ["--held_out", folder / "held_out.jsonl", "--out", out / "explained"]
    lengths = "--gpus 1xh100 --curve false --sequences_per_step 8 --max_prompt_seq_len 9 --max_answer_seq_len 9".split()
    answers = "--reward length --reward_length_characters 5 --data_split 0,0,1 --eval_fraction 0.5 --max_new_tokens 3"

    def main_of(module: str) -> str:
        return f"{module}.__main__" if hasattr(import_module(module), "__path__") else module

    def program(word: str, *words: object) -> Callable[[], object]:
        module = commands()[word].module
        return lambda: import_module(main_of(module)).main([*map(str, words)])

    rolled = [folder / kind for kind in kinds if kind == "grpo"]
    return [
        *(each for kind in kinds for each in _of_records(folder, kind, program)),
        ReadingCommand(
            "audit runs",
            [sft / name for name in ("digests.jsonl", "config.yaml", "environment.json")],
            program("audit", sft, folder / "sft_again"),
            compares=True,
        ),
        ReadingCommand(
            "explain --held_out",
            [folder / "held_out.jsonl", sft / "model" / "tokenizer_config.json", sft / "model" / "tokenizer.json"],
            program("audit explain", record, *held_out),
        ),
        ReadingCommand(
            "plan", [start / "config.json"], program("plan", "--model", start, "--output_dir", out, *lengths)
        ),
        ReadingCommand(
            "report",
            [*(sft / name for name in _OF_A_RUN), *(run / "rollouts.jsonl" for run in rolled)],
            program("report", sft, *rolled, "--out", out / "report.html"),
            skips=True,
        ),
        ReadingCommand(
            "inspect",
            [rows, *tokenizer, start / "config.json"],
            program("inspect", *data, "--model_name_or_path", start),
        ),
        ReadingCommand(
            "preview",
            [rows, *tokenizer],
            program("inspect preview", *data, "--tokenizer", start, "--phase", 1),
        ),
        ReadingCommand(
            "evaluate",
            [sft / "model" / name for name in ("config.json", "model.safetensors", "tokenizer.json")] + [rows],
            program(
                "evaluate", "reward", "--model_name_or_path", sft / "model", *data, *answers.split(),
                "--max_prompt_seq_len", 40, "--output_dir", out / "evaluated",
            ),
        ),
        ReadingCommand(
            "export",
            [checkpoint / "manifest.json", *described, weights],
            lambda: _export(checkpoint, out / "exported"),
        ),
        ReadingCommand(
            "export, as the manifest has it",
            [*described, weights],
            lambda: _export(checkpoint, out / "exported", signs=True),
        ),
        ReadingCommand("--distill", [folder / "teacher.jsonl"], lambda: read_table(folder / "teacher.jsonl")),
        ReadingCommand(
            "--reward_replay",
            [folder / "verdicts" / "judge.rank0.jsonl"],
            lambda: Verdicts("judge", None, 0, folder / "verdicts"),
            skips=True,
        ),
        ReadingCommand("base.json", [served / "base.json"], lambda: Store(served, {"model": "m"})),
        *([ReadingCommand("--rollout_replay", [dump], lambda: _replayed(dump))] if rolled else []),
        *kept_commands(folder, with_rollouts=bool(rolled)),
    ]  # fmt: skip


_OF_A_RUN = ("metrics.jsonl", "samples.jsonl", "summary.json", "config.yaml", "data_report.json")


def _of_records(folder: Path, kind: str, program: Any) -> list[ReadingCommand]:
    record = folder / kind / "records" / ("step_000002_update1" if kind == "grpo" else "step_000002")
    files = [record / name for name in ("record.json", "rank0.safetensors", "record.json", "state.safetensors")]
    explained = folder / "out" / "explained"
    return [
        ReadingCommand(f"audit {kind}", files, program("audit", record), compares=True),
        ReadingCommand(
            f"explain {kind}",
            [*files, folder / kind / "config.yaml"],
            program("audit explain", record, "--out", explained),
        ),
    ]


def _export(checkpoint: Path, out: Path, *, signs: bool = False) -> None:
    """signs: the manifest lists the files as they are, damaged or not."""
    from threestep.plugins.programs import export

    shutil.rmtree(out, ignore_errors=True)
    path = checkpoint / "manifest.json"
    manifest = path.read_bytes() if signs else b""
    try:
        if signs:
            path.unlink()
            about = {name: each for name, each in json.loads(manifest).items() if name not in ("files", "sha256")}
            _write_manifest(checkpoint, about)
        export.main([str(checkpoint), str(out)])
    finally:
        if signs:
            path.write_bytes(manifest)


def _replayed(path: Path) -> None:
    tensors, metadata = _read(path)
    rollout_of(tensors, metadata.pop("conversations", None))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="commands whose names have this")
    options = parser.parse_args(argv)
    folder = options.folder.resolve()
    if not (folder / "clients").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        make_runs(folder, [*STEPS])
    commands = [each for each in commands_of(folder, [*STEPS]) if options.only in each.name]
    counts, wrong = Counter[str](), 0
    for case in cases_of(folder, commands, options.cases, options.seed):
        counts[str(case.found.code)] += 1
        if case.problem:
            wrong += 1
            print(f"{case.words}: {case.problem}\n{case.found.said[-2000:]}", flush=True)
    print(f"{wrong} problems; exit codes: {dict(sorted(counts.items()))}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
