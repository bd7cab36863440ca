"""Out of memory; one seed, many streams; batches that are moved whole, and pinned for a GPU alone; alarms outside of
the main thread, and the time limit of calls in it; files of others: a value of the type that is asked for, or one
sentence with the place."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy as np
import pytest
import torch

from tests.support.cuda_stand_in.device import counted
from tests.support.forked_programs import run_python
from tests.support.heavy import heavy_modules_after
from training.utils.base import alarms
from training.utils.base.alarms import RefusedAlarm, TimeIsUp, alarms_noted, time_limit
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import is_out_of_memory, out_of_memory_sentence
from training.utils.base.reading import checked_json, checked_value, read_text, text_if_there
from training.utils.base.seeds import derived_seed, random_state, seed_everything, set_random_state
from training.utils.base.transfer import moved, pinned
from training.utils.contracts.documents import join
from training.utils.layout.rows import RankedRows, padded_rows

KNOBS = ("--max_tokens_per_micro_batch", "--zero_stage", "--actor_zero_stage", "--gradient_checkpointing", "--offload")


def test_out_of_memory_is_known_by_whoever_had_none_left_and_names_the_knobs():
    with pytest.raises(RuntimeError) as refused:  # what the CPU's allocator says
        torch.empty(2**60, dtype=torch.uint8)
    for problem in (refused.value, MemoryError(), torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to ...")):
        assert is_out_of_memory(problem)
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError("not enough memory"))
    said = out_of_memory_sentence(refused.value, " on rank 1 in a forward of 2 rows")
    assert said.startswith("out of memory on rank 1 in a forward of 2 rows: lower ")
    assert all(knob in said for knob in KNOBS) and "allocate memory" in said
    program = (
        "import torch\nfrom training.utils.run.program import run_program\n"
        "run_program(lambda argv: torch.empty(2**60, dtype=torch.uint8))\n"
    )
    done = run_python(["-c", program])
    assert done.returncode == 2 and done.stderr.startswith("error: out of memory: lower --max_tokens_per_micro_batch")
    assert "Traceback" not in done.stderr


# --- seeds


def test_a_stream_is_its_name_and_fits_every_generator():
    # Written down once: a run must draw the same after an update.
    assert derived_seed(1234, "rollout", 0) == 5746214188259390988
    seeds = {derived_seed(seed, name, index) for seed in (1, 2) for name in ("a", "b") for index in range(100)}
    assert len(seeds) == 400
    for seed in seeds:
        torch.Generator().manual_seed(seed)


def test_everything_is_seeded_and_ranks_differ():
    def draw(seed: int, rank: int) -> tuple[float, float, float]:
        seed_everything(seed, rank)
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    assert draw(1, 0) == draw(1, 0)
    for other in (draw(1, 1), draw(2, 0)):
        assert all(one != two for one, two in zip(draw(1, 0), other, strict=True))


def test_random_numbers_go_on_from_a_state_that_went_through_json():
    seed_everything(5, rank=0)

    def draws():
        return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()

    draws()
    state = json.loads(json.dumps(random_state()))
    expected = draws()
    assert draws() != expected
    set_random_state(state)
    assert draws() == expected


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Named:
    columns: dict[str, torch.Tensor]


def batch() -> RankedRows:
    rows = padded_rows([join(torch.tensor([1, 2]), torch.tensor([3])), join(torch.tensor([4]), torch.tensor([5]))], 0)
    return RankedRows(rows, torch.tensor([0]), torch.tensor([1]), torch.tensor([1.0]))


def test_on_a_cpu_nothing_is_copied():
    made = batch()
    assert pinned(made, CPU) is made
    assert moved(made, CPU).rows.input_ids_NT is made.rows.input_ids_NT
    assert moved(Named({"a": torch.tensor([1])}), "meta").columns["a"].device.type == "meta"


def on_the_device() -> dict:
    made = batch()
    with counted() as counts:
        there = moved(pinned(made, torch.device("cuda")), "cuda")
    parts = [*vars(there.rows).values(), there.better_Q, there.worse_Q, there.weight_Q]
    places = sorted({str(part.device) for part in parts if isinstance(part, torch.Tensor)})
    ids = there.rows.input_ids_NT.tolist()
    return {"places": places, "waits": counts.total("waits"), "copies": counts.total("to_device"), "ids": ids}


def test_to_a_gpu_every_tensor_is_copied_without_waiting(on_cuda):
    assert on_cuda(on_the_device) == {"places": ["cuda:0"], "waits": 0, "copies": 10, "ids": [[1, 2, 3], [4, 5, 0]]}


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def asks(number):
    """Set a handler, and answer a refusal oneself."""
    try:
        signal.signal(number, signal.getsignal(number))
    except ValueError as refusal:
        return str(refusal)


def test_a_refused_alarm_is_noted_though_it_is_caught():
    def work():
        with alarms_noted() as noted:
            assert asks(signal.SIGTERM).startswith("signal only works in main thread")
            assert not noted.any  # ends of the program are no limits of time
            assert asks(signal.SIGALRM).startswith("signal only works in main thread")
        return noted.any

    def ending():
        with alarms_noted(ends_call=True):
            asks(signal.SIGALRM)

    assert in_thread(work)
    with alarms_noted() as noted:
        assert asks(signal.SIGALRM) is None
    assert not noted.any
    with pytest.raises(RefusedAlarm):
        in_thread(ending)


def test_a_refused_alarm_of_a_coroutine_and_its_threads_is_noted():
    async def own():
        await asyncio.to_thread(asks, signal.SIGALRM)

    def work():
        with alarms_noted() as noted:
            asyncio.run(own())
        return noted.any

    assert in_thread(work)


def test_a_thread_of_a_function_is_warned_of_once(capsys, monkeypatch):
    monkeypatch.setattr(alarms, "_warned", threading.Event())
    with alarms_noted() as noted:
        for _ in range(2):
            in_thread(lambda: asks(signal.SIGALRM))
    assert not noted.any
    assert (
        capsys.readouterr().err.count(
            "warning: a time limit that uses signals (signal.signal) was refused in the thread"
        )
        == 1
    )


def test_work_in_time_and_work_that_is_late():
    before = signal.getsignal(signal.SIGURG)
    with time_limit(30, pytest.fail):
        pass
    with pytest.raises(TimeIsUp), time_limit(0.05, pytest.fail):
        threading.Event().wait(30)
    assert signal.getsignal(signal.SIGURG) == before


def test_a_call_that_never_returns_to_python_is_given_up():
    program = (
        "import os, signal, threading\n"
        "from training.utils.base import alarms\n"
        "alarms._STRIKES, alarms._STRIKE_SECONDS = 2, 0.1\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})\n"  # as a call in C: no handler runs
        "with alarms.time_limit(0.1, lambda: os._exit(7)):\n"
        "    threading.Event().wait(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 7


@dataclass(frozen=True)
class Entry:
    step: int
    figures: dict[str, float | None]
    name: str = ""


def test_a_value_has_its_types():
    text = '{"step": 3, "figures": {"loss": 1, "lost": null, "huge": NaN}, "more": []}'
    found = checked_json(Entry, text, "f.json")
    assert (found.step, found.name, type(found.figures["loss"])) == (3, "", float)
    assert found.figures["lost"] is None and np.isnan(found.figures["huge"])
    assert checked_value(list[str], ["a"], "f.yaml") == ["a"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", r"f.json: expects JSON: EOF while parsing"),
        ('{"step": "3", "figures": {}}', r"f.json: step expects a valid integer, got '3'$"),
        ('{"step": true, "figures": {}}', r"f.json: step expects a valid integer, got True$"),
        ('{"figures": {}}', r"f.json: step is missing$"),
        ('{"step": 1.5, "figures": {"a": "b"}}', r"f.json: step expects a valid integer.*\(and 1 more\)$"),
        ("[" * 100_000, "f.json: expects JSON: recursion limit exceeded"),
        ('{"step": ' + "9" * 6000 + "}", "f.json: expects JSON: number out of range"),
        ('{"step": 1, "figures": {"a": "\\ud800"}}', "f.json: expects JSON"),
        ("[]", "f.json: expects an object"),
    ],
    ids=range(9),
)
def test_another_value_is_a_sentence(text, sentence):
    with pytest.raises(ThreestepError, match=sentence) as refusal:
        checked_json(Entry, text, "f.json")
    assert len(str(refusal.value)) < 200


def test_what_is_no_file_is_refused_and_only_what_is_not_there_is_nothing(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "link")
    for name in ("folder", "pipe", "link"):
        for read in (read_text, text_if_there):
            with pytest.raises(ThreestepError, match=f"{name} expects .*, and is no file"):
                read(tmp_path / name)
    assert text_if_there(tmp_path / "gone") is None
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(ThreestepError, match="is not UTF-8 text: byte 2 is invalid"):
        read_text(tmp_path / "bytes")


def test_importing_it_waits_for_no_pydantic():
    script = "import sys, training.utils.base.reading; assert 'pydantic' not in sys.modules"
    assert heavy_modules_after(script)[0] == []
