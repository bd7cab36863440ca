"""DeepSpeed-Chat's flags that have no namesake here: what each step does with them.

A flag of DeepSpeed-Chat that is not in these tables is one of Threestep's own, with the same meaning.
`python -m training.utils.run.deepspeed_chat` prints the tables as docs/from_deepspeed_chat.md shows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from training.utils.run.errors import Mistakes, ThreestepError

Words = Callable[[str, Mapping[str, str]], list[str]]


@dataclass(frozen=True)
class Needless:
    """Accepted, without effect. why: the sentence that says so. only: the one value that is needless; others are
    mistakes."""

    why: str
    takes_value: bool = True
    only: str | None = None


@dataclass(frozen=True)
class Renamed:
    """now: the flag that has the meaning today. words: the words to read instead, from the value and all of the
    command line's flags; default: `now` with the same value. how: what else there is to know."""

    now: str
    how: str = ""
    takes_value: bool = True
    words: Words | None = None


@dataclass(frozen=True)
class Refused:
    """A mistake. why: what there is instead."""

    why: str
    takes_value: bool = True


OldFlag = Needless | Renamed | Refused


def translated(argv: Sequence[str], old_flags: Mapping[str, OldFlag]) -> tuple[list[str], list[str]]:
    """Return `argv` in today's flags, and one line for each old flag in it.

    Raises ThreestepError for the refused ones, all at once, and where a value is missing.
    """
    mistakes = Mistakes()
    given = _flags_with_values(argv)
    words: list[str] = []
    lines: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, has_equals, value = word.partition("=")
        old = old_flags.get(flag)
        if old is None:
            words.append(word)
            continue
        if old.takes_value and not has_equals:
            if not rest or rest[0].startswith("--"):
                mistakes.add(f"{flag} expects a value after it, got none")
                continue
            value = rest.pop(0)
        if isinstance(old, Refused):
            mistakes.add(f"{flag} {old.why}")
        elif isinstance(old, Needless):
            mistakes.require(old.only in (None, value), f"{flag} expects {old.only}, got {value}: {old.why}")
            lines.append(f"{flag} is not needed: {old.why}")
        else:
            new = mistakes.note(old.words, value, given) if old.words else [old.now, value]
            words += new or []
            lines.append(f"{flag} is read as {' '.join(new or [])}" + (f": {old.how}" if old.how else ""))
    mistakes.raise_if_any()
    return words, lines


def _flags_with_values(argv: Sequence[str]) -> dict[str, str]:
    """Each flag with the one word that follows it, "" where another flag follows."""
    found: dict[str, str] = {}
    for word, after in zip(argv, [*argv, "--"][1:], strict=True):
        if word.startswith("--"):
            flag, has_equals, value = word.partition("=")
            found[flag] = value if has_equals else "" if after.startswith("--") else after
    return found


def _whole(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ThreestepError(f"{flag} expects a whole number, got '{value}'") from None


def _eval_rows(value: str, given: Mapping[str, str]) -> list[str]:
    batch = _whole("--per_device_eval_batch_size", given.get("--per_device_eval_batch_size", "16"))
    rows = _whole("--eval_iters", value) * batch * int(os.environ.get("WORLD_SIZE", "1"))
    return ["--max_eval_rows", str(rows)]


def _end_token(_value: str, given: Mapping[str, str]) -> list[str]:
    token = given.get("--end_of_conversation_token") or given.get("--eot_token") or "<|endoftext|>"
    return ["--end_of_conversation_token", token, "--add_end_of_conversation_token", "true"]


def _test_steps(_value: str, given: Mapping[str, str]) -> list[str]:
    steps = _whole("--test_stop_step", given.get("--test_stop_step", "0"))
    return ["--max_train_steps", str(max(1, steps))]


def _no_dropout(role: str) -> Renamed:
    flag = f"--{role}dropout"
    return Renamed(flag, takes_value=False, words=lambda _value, _given: [flag, "0.0"])


_ALL_STEPS: dict[str, OldFlag] = {
    "--deepspeed": Needless("every run is DeepSpeed's", takes_value=False),
    "--deepscale": Needless("every run is DeepSpeed's", takes_value=False),
    "--compute_fp32_loss": Needless(
        "losses and log-probabilities are computed in float32 whatever --dtype is", takes_value=False
    ),
    "--enable_tensorboard": Needless("every run writes OUTPUT_DIR/tensorboard", takes_value=False),
    "--tensorboard_path": Needless("the curves are in OUTPUT_DIR/tensorboard, beside what else the run leaves"),
    "--add_eot_token": Renamed(
        "--end_of_conversation_token TOKEN --add_end_of_conversation_token true",
        "TOKEN is --eot_token's, else <|endoftext|>; it ends every response of every step",
        takes_value=False,
        words=_end_token,
    ),
    "--eot_token": Needless("with --add_eot_token it is read as --end_of_conversation_token, without it has no use"),
}
_ONE_MODEL: dict[str, OldFlag] = {
    **_ALL_STEPS,
    "--deepscale_config": Renamed("--deepspeed_config"),
    "--disable_dropout": _no_dropout(""),
}
_PRINT_LOSS = Needless("the progress bar and metrics.jsonl tell the loss of every step", takes_value=False)
_PADDING = Needless("where a text begins and ends is known from lengths, not from pad tokens")
_CONFIG = Refused("is for steps 1 and 2; step 3's two engines are configured by --actor_zero_stage, --offload, --dtype")

SFT: dict[str, OldFlag] = {
    **_ONE_MODEL,
    "--print_loss": _PRINT_LOSS,
}
REWARD: dict[str, OldFlag] = {
    **_ONE_MODEL,
    "--num_padding_at_beginning": _PADDING,
    "--eval_iters": Renamed(
        "--max_eval_rows ROWS", "ROWS is eval_iters x per_device_eval_batch_size x ranks", words=_eval_rows
    ),
}
DPO: dict[str, OldFlag] = {
    **_ONE_MODEL,
    "--print_loss": _PRINT_LOSS,
    "--offload_reference_model": Needless(
        "the reference's log-probabilities are read once and kept, and no reference is in memory while training",
        takes_value=False,
    ),
}
PPO: dict[str, OldFlag] = {
    **_ALL_STEPS,
    "--deepspeed_config": _CONFIG,
    "--deepscale_config": _CONFIG,
    "--num_padding_at_beginning": _PADDING,
    "--preprocessing_num_workers": Renamed("--num_workers"),
    "--per_device_train_batch_size": Renamed("--per_device_generation_batch_size", "an older spelling"),
    "--per_device_mini_train_batch_size": Renamed("--per_device_training_batch_size", "an older spelling"),
    "--generation_batch_numbers": Renamed("--generation_batches", "an older spelling"),
    "--disable_actor_dropout": _no_dropout("actor_"),
    "--disable_critic_dropout": _no_dropout("critic_"),
    "--enable_hybrid_engine": Needless(
        "rollouts decode with a cache at any ZeRO stage, and ZeRO-3 gathers the weights once a rollout; "
        "--rollout_engine hybrid asks for DeepSpeed's own engine",
        takes_value=False,
    ),
    "--unpin_actor_parameters": Needless("rollouts keep no second, pinned copy of the weights", takes_value=False),
    "--release_inference_cache": Needless("the cache of a rollout is freed when the rollout ends", takes_value=False),
    "--inference_tp_size": Needless("every rank draws its own responses from whole weights", only="1"),
    "--tp_gather_partition_size": Needless("no layer is split over ranks"),
    "--enable_mixed_precision_lora": Needless(
        "frozen weights stay in --dtype, which ZeRO-3 shards over the ranks", takes_value=False
    ),
    "--align_overflow": Needless(
        "bf16, the default, has no overflow; with fp16 actor and critic each leave out their own step",
        takes_value=False,
    ),
    "--print_answers": Needless(
        "every evaluation writes prompts, answers and scores to OUTPUT_DIR/samples.jsonl", takes_value=False
    ),
    "--print_answers_interval": Needless("--eval_interval says how often samples.jsonl is added to"),
    "--enable_test_mode": Renamed(
        "--max_train_steps STEPS", "STEPS is --test_stop_step's", takes_value=False, words=_test_steps
    ),
    "--test_stop_step": Needless("with --enable_test_mode it is read as --max_train_steps, without it has no use"),
}
STEPS: dict[str, dict[str, OldFlag]] = {
    "Step 1, SFT": SFT,
    "Step 2, reward model": REWARD,
    "Step 2, DPO": DPO,
    "Step 3, PPO": PPO,
}


def as_markdown() -> str:
    """Return the tables, one a step, for docs/from_deepspeed_chat.md."""
    lines: list[str] = []
    for title, old_flags in STEPS.items():
        lines += [f"### {title}", "", "| flag | here |", "| --- | --- |"]
        for flag, old in sorted(old_flags.items()):
            if isinstance(old, Needless):
                only = f" (other values than {old.only} are refused)" if old.only else ""
                lines.append(f"| `{flag}` | not needed: {old.why}{only} |")
            elif isinstance(old, Renamed):
                given = old.words("", {}) if old.words and not old.takes_value and not old.how else [old.now]
                lines.append(f"| `{flag}` | read as `{' '.join(given)}`" + (f": {old.how} |" if old.how else " |"))
            else:
                lines.append(f"| `{flag}` | refused: {old.why} |")
        lines.append("")
    return "\n".join(lines).replace("<|", "<\\|").replace("|>", "\\|>")


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
