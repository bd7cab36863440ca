"""Out of memory, in one sentence that names the flags that help. Recognises torch's errors without importing it."""

from __future__ import annotations

from training.utils.base.errors import first_line

_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_out_of_memory(problem: BaseException) -> bool:
    """True if the allocator of a device, of the CPU or of Python ran out of memory."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, (RuntimeError, OSError)) and any(words in str(problem) for words in _CPU_ALLOCATOR)


def out_of_memory_sentence(problem: BaseException, where: str = "") -> str:
    """where: what was being computed, and the lengths of its rows; "" if unknown."""
    return (
        f"out of memory{where}: lower --max_tokens_per_micro_batch or the batch size, shorten the sequences "
        "(--max_seq_len; in step 3 --max_prompt_seq_len and --max_answer_seq_len), raise --zero_stage (in step 3 "
        "--actor_zero_stage and --critic_zero_stage), or switch on --gradient_checkpointing (in step 3 "
        f"--actor_gradient_checkpointing and --critic_gradient_checkpointing) or --offload; the allocator said: "
        f"{first_line(problem)}"
    )
