"""Whole runs of step 3 with tools and environments that fail in every way, on two ranks with uneven conversations: they
end, nothing is lost, and each failure is counted as often as it happened."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.end_to_end.conftest import run_step, save_start
from tests.support.chat_templates import chat_template, chat_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Each writes a line for every call, before anything else. Texts of a random model decide what is called.
FAULTS = '''
import os
import subprocess
import time


def tell(name):
    file = os.open(TALLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (name + "\\n").encode())
    os.close(file)


def nap() -> str:
    """Never returns in time."""
    tell("nap")
    time.sleep(600)


def fail() -> str:
    """Raises."""
    tell("fail")
    raise SystemExit("no")


async def megabyte() -> str:
    """Answers a megabyte."""
    tell("megabyte")
    return "x" * 2**20


def noise() -> bytes:
    """Answers bytes that are no UTF-8."""
    tell("noise")
    return b"\\xff\\xfe no"


def die() -> str:
    """Dies with its process."""
    tell("die")
    process = subprocess.Popen(["sleep", "600"])
    process.kill()
    if process.wait():
        raise ChildProcessError("the process died")


def calls(text):
    names = ["fail", "megabyte", "noise", "die", "unknown", "fail", "nap"]
    number = sum(text.encode())
    return [] if number % 5 == 0 else [{"name": names[number % 7], "arguments": {}}]


class Endless:
    """Never ends by itself."""

    def reset(self, row):
        return row["messages"], None

    def step(self, message):
        tell("endless")
        return [{"role": "user", "content": "more"}], 0.5, False

    def close(self):
        tell("closed")


class Quick(Endless):
    """Ends at once."""

    def step(self, message):
        tell("quick")
        return [], 1.0, True


class Stuck(Endless):
    """Hangs in its second step."""

    turns = 0

    def step(self, message):
        self.turns += 1
        if self.turns == 2:
            tell("stuck")
            time.sleep(600)
        return super().step(message)


class Broken(Stuck):
    """Raises in its second step."""

    def step(self, message):
        self.turns += 1
        if self.turns == 2:
            tell("broken")
            raise OSError("gone")
        return Endless.step(self, message)
'''
KINDS = ("tools", "Endless", "Quick", "tools", "Stuck", "Quick", "Broken", "tools")
TOOLS, CLASSES = ("nap", "fail", "megabyte", "noise", "die"), ("Endless", "Quick", "Stuck", "Broken")
PROMPTS, SAMPLES, ROLLOUTS = 8, 2, 2


def test_faults_end_no_run_and_are_all_counted(place):
    folder, file, tally = place / "acting_faults", place / "acting_faults.py", place / "tally.txt"
    start = save_start(place / "start_of_acting_faults", tokenizer=chat_tokenizer(chat_template("chatml")))
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    file.write_text(f"TALLY = {str(tally)!r}\n{FAULTS}")
    rows = place / "acting_faults.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"Say {n}.", "environment": KINDS[n % len(KINDS)], "ground_truth": str(n)}) + "\n"
            for n in range(40)
        )
    )
    flags = [
        *("--actor_model_name_or_path", start, "--data_path", f"jsonl:{rows}", "--output_dir", folder),
        *("--data_output_path", place / "acting_faults_cache", "--tool_parser", f"{file}:calls"),
        *("--environment", ",".join(f"{file}:{name}" for name in CLASSES)),
        *("--tools", ",".join(f"{file}:{name}" for name in TOOLS)),
        *"--data_split 0,0,1 --eval_fraction 0.2 --max_prompt_seq_len 1500 --max_answer_seq_len 600".split(),
        *"--max_turns 3 --tool_seconds 3 --environment_seconds 3 --max_observation_characters 100".split(),
        *"--dtype fp32 --reward environment --advantage grpo --kl_coef 0 --actor_learning_rate 1e-3".split(),
        *("--num_samples_per_prompt", SAMPLES, "--per_device_generation_batch_size", PROMPTS // 2),
        *("--max_train_steps", ROLLOUTS, "--per_device_training_batch_size", 4, "--report", "false"),
        *("--stop", "a", "e", "i", "o", "t", "s", "n"),
    ]
    ran = run_step(3, flags, ranks=2)
    assert ran.code == 0, ran.words

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    figures, cuts = Counter(), Counter(sample["cut_by"] for sample in samples)
    for sample in samples:
        figures.update(sample["environment_figures"])
    for line in (line for line in lines if "conversation/turns" in line):
        for name, mean in line.items():
            if name.startswith("environment/"):
                figures[name.removeprefix("environment/")] += mean * PROMPTS * SAMPLES
            elif name.startswith("conversation/cut_by_"):
                cuts[name.removeprefix("conversation/cut_by_")] += round(mean * PROMPTS * SAMPLES)
    counted, told = {name: round(value) for name, value in figures.items()}, Counter(tally.read_text().split())
    assert counted["slow_calls"] == told["nap"] > 0
    assert counted["failed_calls"] == told["fail"] + told["die"] and told["fail"] > 0 < told["die"]
    assert counted["cut_answers"] == told["megabyte"] > 0 and counted["mended_answers"] == told["noise"] > 0
    assert counted["calls"] == sum(told[name] for name in TOOLS) + counted["unknown_calls"] > counted["unknown_calls"]
    assert counted["environment_failures"] == told["stuck"] + told["broken"] and told["stuck"] > 0 < told["broken"]
    assert told["quick"] > 0 and cuts["turns"] > 0
    conversations = sum(sample["environment_figures"] != {} or sample["turns"] > 0 for sample in samples)
    assert conversations == len(samples) == 2 * 8  # before and after training, none is lost
    said = ran.stdout + ran.stderr
    assert said.count("Further failures are counted as environment_failures") in (1, 2)  # a rank each
