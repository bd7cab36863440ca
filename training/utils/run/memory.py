"""Out of memory, in one sentence that names the knobs. Imports no torch: its errors are known by their names."""

from __future__ import annotations

_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether a device's allocator, the CPU's or Python's own had nothing left."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, (RuntimeError, OSError)) and any(words in str(problem) for words in _CPU_ALLOCATOR)


def out_of_memory_sentence(problem: BaseException, where: str = "") -> str:
    """where: what was being computed, and the lengths of its rows; "" where that is not known."""
    said = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
    return (
        f"out of memory{where}: lower --max_tokens_per_micro_batch or the batch size, shorten the sequences "
        "(--max_seq_len; in step 3 --max_prompt_seq_len and --max_answer_seq_len), raise --zero_stage (in step 3 "
        "--actor_zero_stage and --critic_zero_stage), or switch on --gradient_checkpointing (in step 3 "
        f"--actor_gradient_checkpointing and --critic_gradient_checkpointing) or --offload; the allocator said: {said}"
    )
