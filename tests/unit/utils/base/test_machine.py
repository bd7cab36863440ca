"""Out of memory, known by whoever had none left, and the knobs."""

from __future__ import annotations

import pytest
import torch

from tests.support.forked_programs import run_python
from training.utils.base.machine import is_out_of_memory, out_of_memory_sentence

KNOBS = ("--max_tokens_per_micro_batch", "--zero_stage", "--actor_zero_stage", "--gradient_checkpointing", "--offload")


def refused() -> RuntimeError:
    """What the CPU's allocator says."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    return error.value


def test_what_is_out_of_memory():
    assert is_out_of_memory(refused()) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError("not enough memory"))


def test_the_sentence_names_the_knobs():
    said = out_of_memory_sentence(refused(), " on rank 1 in a forward of 2 rows")
    assert said.startswith("out of memory on rank 1 in a forward of 2 rows: lower ")
    assert all(knob in said for knob in KNOBS) and "allocate memory" in said


def test_a_program_ends_with_it():
    program = (
        "import torch\nfrom training.utils.run.program import run_program\n"
        "run_program(lambda argv: torch.empty(2**60, dtype=torch.uint8))\n"
    )
    done = run_python(["-c", program])
    assert done.returncode == 2 and done.stderr.startswith("error: out of memory: lower --max_tokens_per_micro_batch")
    assert "Traceback" not in done.stderr
