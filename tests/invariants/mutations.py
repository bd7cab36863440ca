"""Damaged dataset files and configurations: each ends in a result or in one ThreestepError, never in another exception,
a hang or a wrong count.

    python -m tests.invariants.mutations --count 20000 --first 1000

is the long form of test_mutations.py. A case is made from its number alone, so that one that fails can be run again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import importlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml

from tests.support.data_flags import data_flags
from threestep.plugins.deepspeed_json.users_json import UsersJson
from threestep.plugins.programs.all_steps import check_settings, read_plan
from training.step3_ppo import STEP
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.flags.ppo_flags import PpoFlags
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.build.build import build_phase
from training.utils.data.files.readers import open_rows
from training.utils.data.formats.records import TreeRows, holds_trees
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.arguments import parse_arguments, read_yaml, resolved_settings
from training.utils.flags.flags import note_mistakes
from training.utils.setup.setup import whole_steps

LIMIT_SECONDS = 20.0  # a case takes some hundredths of one on an idle core
HI, HO = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Ho"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
JUNK: list[Any] = [
    None, "", " ", "\u0000", "\ud800", "naïve 🍐", "x" * 3000, 0, -1, 10**30, 0.5, float("nan"), float("inf"), True, [],
    {}, [[]], [None], {"a": 1}, [{"role": "user"}], [{"role": "assistant", "content": None}], [HO, HO], ["a", "b"],
    int("9" * 4000), "<|endoftext|>",
    "Human: ? Assistant:", [{"from": "human", "value": "x"}], [[[[[[]]]]]], {"role": "user"},
]  # fmt: skip
WORDS: list[str] = [
    "", " ", "-1", "0", "1", "2", "1e309", "nan", "inf", "-inf", "1.5", "true", "no", "None", "null", "[]", "{}", "x",
    "é🍐", "--", "-", "--seed", "a b", "1,2", "0,0,0", "6,2,2", "1e400,1,1", "jsonl:", "jsonl:no.jsonl", "csv:*",
    "99" * 20, "bf16", "fp16", "cosine", "right", "left", "error", "drop", "model:nan", "embedded",
    "gsm8k:1,gsm8k:2",
    "f.py:f", "(", "0x10", "1_000", "\t", "@", "=", "~", "chat_template", "messages", "a.b.c", "\n", "%s", "{0}",
    "file:///", "s3://",
]  # fmt: skip


class TooLong(BaseException):
    """The watchdog's: no `except Exception` swallows it."""


@dataclass(frozen=True)
class Case:
    """What became of one mutation. problem: None where it ended as it has to. said: what was changed, and its words."""

    number: int
    kind: str
    ended: str
    problem: str | None = None
    said: str = ""


@contextlib.contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """TooLong in the main thread where the body takes longer."""

    def bark(_number: int, _frame: Any) -> None:
        raise TooLong(f"took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(number: int, kind: str, tokenizer: Any) -> Case:
    """Make and run the case of that number in the present folder, which it may fill."""
    dice = random.Random(f"{kind} {number}")
    try:
        with watchdog(LIMIT_SECONDS), contextlib.redirect_stdout(io.StringIO()):
            KINDS[kind](dice, tokenizer)
    except ThreestepError as mistake:
        empty = "" if str(mistake).strip() else "an empty sentence"
        return Case(number, kind, "mistake", empty or None)
    except (Exception, TooLong, SystemExit) as problem:  # noqa: BLE001 (what is looked for)
        return Case(number, kind, "failed", "".join(traceback.format_exception(problem))[-3000:])
    return Case(number, kind, "result")


def run_cases(numbers: range, tokenizer: Any) -> Iterator[Case]:
    """Run cases of all kinds in turn, each in the same folder, which is emptied as it goes."""
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    home = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="threestep_mutations_") as folder:
        os.chdir(folder)
        try:
            for number in numbers:
                yield run_case(number, kinds[number % len(kinds)], tokenizer)
        finally:
            os.chdir(home)


def command_line(run: Callable[[range], Iterator[Case]], count: int) -> None:
    """Run the cases of the numbers that the command line asks for, print those that went wrong, and all by kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    asked = parser.parse_args()
    ended: Counter[tuple[str, str]] = Counter()
    for case in run(range(asked.first, asked.first + asked.count)):
        ended[case.kind, "wrong" if case.problem else case.ended] += 1
        if case.problem:
            print(f"--- case {case.number} ({case.kind}) {case.said}\n{case.problem}", flush=True)
    for (kind, how), times in sorted(ended.items()):
        print(f"{times:6d} {kind}: {how}")
    sys.exit(1 if any(how == "wrong" for _, how in ended) else 0)


# Dataset files.


def data_file(dice: random.Random, tokenizer: Any) -> None:
    """A file of some form with a few rows, damaged in its rows or its bytes, and built for a phase."""
    form, phase = dice.choice(list(FORMS)), dice.choice((1, 2, 3))
    if phase == 2 and form not in ("pair", "preference messages", "ranked") and dice.random() < 0.8:
        phase = dice.choice((1, 3))
    rows = [FORMS[form](index) for index in range(dice.randint(1, 6))]
    for _ in range(dice.choice((0, 1, 1, 2))):
        damage_rows(dice, rows)
    reader = dice.choice(("jsonl", "jsonl", "json", "csv", "parquet", "arrow"))
    content = WRITERS[reader](rows)
    if content is None:  # rows that this kind of file cannot hold
        reader, content = "jsonl", write_jsonl(rows)
    for _ in range(dice.choice((0, 0, 0, 1, 2))):
        content = damage_bytes(dice, content)
    path = Path(f"rows.{reader}")
    path.write_bytes(content)
    chat = dice.random() < 0.4
    given = {"prompt_style": "chat_template", "bad_conversations": dice.choice(("error", "drop"))} if chat else {}
    given["truncation"] = dice.choice(("right", "drop", "middle"))
    build_and_count(phase, reader, path, tokenizer, given)


def build_and_count(phase: int, reader: str, path: Path, tokenizer: Any, given: dict[str, Any]) -> None:
    split = ",".join("1" if place == phase else "0" for place in (1, 2, 3))
    name = f"{reader}:{path}"
    flags = data_flags(
        **{
            "data_path": [name], "data_split": split, "data_output_path": "cache", "num_workers": 1, "max_seq_len": 64,
            "max_prompt_seq_len": 48, "eval_fraction": 0.0, "rebuild_cache": True, **given,
        }
    )  # fmt: skip
    mistakes = Mistakes()
    note_mistakes(flags, mistakes)
    mistakes.raise_if_any()
    built = build_phase(phase, flags, tokenizer, seed=1, is_main_rank=False)
    check_counts(built, reader, path, given)


def check_counts(built: Any, reader: str, path: Path, given: dict[str, Any]) -> None:
    """Rows in = rows kept + rows dropped, and those kept can all be read."""
    rows = open_rows(reader, [str(path)], None)
    offered = len(TreeRows(rows)) if holds_trees(rows.kinds) else len(rows)
    if reader == "jsonl":
        assert len(rows) == sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    report = built.report.train
    dropped = sum(report.dropped.values())
    assert report.rows == len(built.train) == sum(1 for _ in built.train), "rows kept"
    assert built.report.eval.rows == len(built.eval)
    kept = report.rows + built.report.eval.rows
    dropped += sum(built.report.eval.dropped.values())
    if not {"max_train_rows", "max_eval_rows"} & given.keys():
        assert kept + dropped == offered, f"{offered} rows in, {kept} kept, {dropped} dropped"
    assert report.tokens == sum(row.length_tokens for row in built.train), "tokens"


def pair_row(index: int) -> dict[str, Any]:
    return {"prompt": f"Human: {index}? Assistant:", "chosen": f" yes {index}", "rejected": " no"}


FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "pair": pair_row,
    "completion": lambda index: {"prompt": f"{index}? ", "completion": "yes"},
    "messages": lambda index: {"messages": [HI, HO] * (index % 2 + 1)},
    "preference messages": lambda index: {"prompt": [HI], "chosen": [HO], "rejected": [{**HO, "content": f"{index}"}]},
    "sharegpt": lambda index: {
        "conversations": [{"from": "human", "value": f"{index}"}, {"from": "gpt", "value": "yes"}]
    },
    "alpaca": lambda index: {"instruction": f"Do {index}", "input": "it" * (index % 2), "output": "done"},
    "verl": lambda index: {
        "data_source": "x/y", "prompt": [HI], "reward_model": {"ground_truth": str(index)},
        "extra_info": {"index": index},
    },
    "ranked": lambda index: {"prompt": f"{index}?", "responses": ["a", "b", f"c{index}"]},
    "text": lambda index: {"text": f"Some text {index}."},
    "tools": lambda index: {"messages": [HI, HO], "tools": json.dumps([{"name": "f", "parameters": {}}])},
    "weights": lambda index: {"messages": [HI, {**HO, "weight": index % 2}, HI, {**HO, "train": index % 3 == 0}]},
    "marked": lambda index: {"prompt": [HI], "completion": [HO], "label": index % 2 == 0},
    "parts": lambda index: {"messages": [{**HI, "content": [{"type": "text", "text": f"{index}"}]}, HO], "images": []},
    "system": lambda index: {"system": "S" * (index % 2), "question": f"{index}?", "response": "yes"},
    "tree": lambda index: {
        "message_id": str(index), "parent_id": str(index - 1) if index % 4 else None, "text": f"{index}",
        "role": "assistant" if index % 2 else "prompter",
    },
}  # fmt: skip


def damage_rows(dice: random.Random, rows: list[Any]) -> None:
    """One change to one row, in place."""
    place = dice.randrange(len(rows))
    row = rows[place]
    kind = dice.randrange(8)
    if kind == 0 or not isinstance(row, dict) or not row:
        rows[place] = dice.choice(JUNK)
    elif kind == 1:
        del row[dice.choice(list(row))]
    elif kind == 2:
        row[dice.choice(["extra", "", "messages", "prompt", "a.b", "chat_template_kwargs"])] = dice.choice(JUNK)
    elif kind == 3:
        rows.insert(dice.randrange(len(rows) + 1), dict(row))
    elif kind == 4:
        del rows[place]
        rows or rows.append({})
    elif kind == 5 and any(isinstance(value, list) and value for value in row.values()):
        inner = dice.choice([value for value in row.values() if isinstance(value, list) and value])
        damaged = dict(inner[0]) if isinstance(inner[0], dict) else inner[0]
        if isinstance(damaged, dict) and damaged:
            damaged[dice.choice([*damaged, "tool_calls", "extra"])] = dice.choice(JUNK)
        else:
            damaged = dice.choice(JUNK)
        row.update({name: [damaged, *inner[1:]] for name, value in row.items() if value is inner})
    else:
        row[dice.choice(list(row))] = dice.choice(JUNK)


def damage_bytes(dice: random.Random, content: bytes) -> bytes:
    """One change to the bytes of a file."""
    at = dice.randrange(len(content) + 1)
    end = min(len(content), at + dice.choice((1, 1, 4, 30)))
    kind = dice.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[end:]
    if kind == 2:
        return content[:at] + dice.randbytes(end - at) + content[end:]
    if kind == 3:
        return content[:at] + content[at:end] * 2 + content[end:]
    if kind == 4:
        inserted = dice.choice(
            [b'"', b"{", b"}", b"[", b",", b"\n", b"\r", b"\x00", b"\xff", b"\\", b"\xef\xbb\xbf", b"\t"]
        )
        return content[:at] + inserted + content[at:]
    flipped = bytes([content[at] ^ 1 << dice.randrange(8)]) if at < len(content) else b""
    return content[:at] + flipped + content[at + 1 :]


def write_jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def write_csv(rows: list[Any]) -> bytes | None:
    if not all(isinstance(row, dict) for row in rows):
        return None
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows([row.get(name, "") for name in columns] for row in rows)
    return file.getvalue().encode("utf-8", "replace")


def write_table(rows: list[Any], to_parquet: bool) -> bytes | None:
    if not all(isinstance(row, dict) for row in rows):
        return None
    try:
        table = pyarrow.Table.from_pylist(rows)
        sink = io.BytesIO()
        if to_parquet:
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):  # columns of many kinds
        return None
    return sink.getvalue()


WRITERS: dict[str, Callable[[list[Any]], bytes | None]] = {
    "jsonl": write_jsonl,
    "json": lambda rows: json.dumps(rows, indent=1).encode("utf-8", "surrogatepass"),
    "csv": write_csv,
    "parquet": lambda rows: write_table(rows, to_parquet=True),
    "arrow": lambda rows: write_table(rows, to_parquet=False),
}


# Configurations.


PROGRAMS = ("step1_sft.main", "step2_reward.main", "step2_dpo.main", "step3_ppo.main")


def configuration(dice: random.Random, tokenizer: Any) -> None:
    """Settings of a program in a YAML file and as flags, damaged, and read up to where a model would load."""
    step = dice.choice(PROGRAMS)
    declared = importlib.import_module(f"training.{step}").STEP
    groups, old = declared.groups, declared.old_flags
    names = [field.name for group in groups for field in dataclasses.fields(group)]
    settings: dict[str, Any] = {"seed": 3, "max_train_steps": 2}
    settings["data_path"] = ["embedded"]
    settings |= dict.fromkeys((name for name in names if name.endswith("model_name_or_path")), "model")
    for _ in range(dice.choice((0, 1, 1, 2))):
        kind = dice.randrange(5)
        if kind == 0:
            settings[dice.choice(names)[: dice.randint(1, 30)]] = dice.choice(WORDS)
        elif kind == 1:
            settings[dice.choice([None, 3, True, "é", "a b", "config", "local_rank", "help"])] = dice.choice(JUNK)
        elif kind == 2:
            settings.pop(dice.choice(list(settings)), None)
            settings = settings or {"seed": 1}
        else:
            settings[dice.choice(names)] = dice.choice([*JUNK, *WORDS])
    text = yaml.safe_dump(settings, allow_unicode=True).encode("utf-8", "surrogatepass")
    for _ in range(dice.choice((0, 0, 0, 1, 2))):
        text = damage_bytes(dice, text)
    Path("run.yaml").write_bytes(text)
    argv = ["--config", "run.yaml"]
    for _ in range(dice.choice((0, 0, 1, 2))):
        word = dice.choice(WORDS)
        flag = f"--{dice.choice(names)}"
        argv += dice.choice([[flag, word], [flag], [f"{flag}={word}"], [word], [flag[:-1], word], ["--config", word]])
    if dice.random() < 0.1:
        dice.shuffle(argv)
    read_configuration(step, groups, old, argv)


def read_configuration(step: str, groups: Any, old: Any, argv: list[str]) -> None:
    """What a program does with its settings before data and model, without its folder."""
    parsed = parse_arguments(groups, argv, "", old)
    yaml_text(resolved_settings(parsed))
    by_name = {type(instance).__name__: instance for instance in parsed}
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    random.seed(by_name["RunArguments"].seed)
    torch.Generator().manual_seed(by_name["RunArguments"].seed)
    if "EngineArguments" in by_name:
        engine = by_name["EngineArguments"]
        engine_config(engine.settings(1e-3), 1, 100, False)
        whole_steps(engine, 1000, ranks)
    if step == "step3_ppo.main":
        checked_components(PpoFlags(*(by_name[group.__name__] for group in STEP.groups)))


def yaml_text(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=True, allow_unicode=True)


def damaged_flags(dice: random.Random, tokenizer: Any) -> None:
    """A sound file, read with damaged data flags as a command line gives them."""
    form, phase = dice.choice(list(FORMS)), dice.choice((1, 2, 3))
    path = Path("sound.jsonl")
    path.write_bytes(write_jsonl([FORMS[form](index) for index in range(8)]))
    # Names of hubs and of other folders stay out of it, and so do processes, which take their time to start.
    passed_over = ("data_output_path", "num_workers", "dataset_module")
    groups = [getattr(DataArguments(), group.name) for group in dataclasses.fields(DataArguments)]
    names = [field.name for group in groups for field in dataclasses.fields(group) if field.name not in passed_over]
    argv = ["--data_path", f"jsonl:{path}", "--data_output_path", "cache", "--num_workers", "1"]
    if dice.random() < 0.5:
        argv += ["--prompt_style", "chat_template"]
    for _ in range(dice.choice((1, 1, 1, 2))):
        name = dice.choice(names)
        value = dice.choice([*WORDS, "prompt", "chosen", "messages", "7", "0.3", "rows.jsonl", f"jsonl:{path}"])
        argv += [f"--{name}={value}"]
    (flags,) = parse_arguments((DataArguments,), argv, "")
    built = build_phase(phase, flags, tokenizer, seed=1, is_main_rank=False)
    for rows, report in ((built.train, built.report.train), (built.eval, built.report.eval)):
        assert report.rows == len(rows) == sum(1 for _ in rows)


def whole_run(dice: random.Random, tokenizer: Any) -> None:
    """The YAML file of all three steps, damaged, read up to where the first of them would start."""
    steps = {"step1_sft": {"num_train_epochs": 1}, "step2_reward": {"zero_stage": 1}, "step3_ppo": {"temperature": 0.7}}
    shared = {"data_path": ["embedded"], "data_split": "1,1,1"}
    content = {"output_dir": "out", "ranks": 2, "seed": 1, "new_model": {"vocab_size": 99}, "shared": shared, **steps}
    place: dict[Any, Any] = dice.choice(
        [content, content, *(part for part in content.values() if isinstance(part, dict))]
    )
    if dice.random() < 0.7:
        place[dice.choice([*place, "extra", 3, None])] = dice.choice([*JUNK, *WORDS])
    text = yaml.safe_dump(content, allow_unicode=True).encode("utf-8", "surrogatepass")
    for _ in range(dice.choice((0, 0, 1))):
        text = damage_bytes(dice, text)
    Path("all.yaml").write_bytes(text)
    plan = read_plan(read_yaml("all.yaml"), "all.yaml")
    files = {step: Path(f"{step}.yaml") for step in plan.settings}
    for step, path in files.items():
        path.write_text(yaml_text(plan.settings[step]), encoding="utf-8")
    check_settings(files)


def deepspeed_json(dice: random.Random, tokenizer: Any) -> None:
    """A DeepSpeed configuration of the user's, damaged."""
    content: dict[str, Any] = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5}, "bf16": {"enabled": True}}
    if dice.random() < 0.7:
        place = dice.choice([content, *content.values()])
        place[dice.choice([*place, "extra", "optimizer", "fp16", "offload_optimizer"])] = dice.choice([*JUNK, *WORDS])
    text = json.dumps(content).encode("utf-8", "surrogatepass")
    for _ in range(dice.choice((0, 1))):
        text = damage_bytes(dice, text)
    Path("ds.json").write_bytes(text)
    settings = EngineSettings(dtype="bf16", zero_stage=1, own_config=UsersJson("ds.json"))
    UsersJson("ds.json").notes(engine_config(settings, 1, 100, False))


KINDS: dict[str, Callable[[random.Random, Any], None]] = {
    "whole run": whole_run,
    "deepspeed json": deepspeed_json,
    "data file": data_file,
    "configuration": configuration,
    "data flags": damaged_flags,
}
SHARES = {"data file": 9, "configuration": 6, "data flags": 3, "whole run": 1, "deepspeed json": 1}


if __name__ == "__main__":
    from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer

    own = train_tokenizer(SENTENCES)
    own.chat_template = CHAT_TEMPLATE
    command_line(lambda numbers: run_cases(numbers, own), 20000)
