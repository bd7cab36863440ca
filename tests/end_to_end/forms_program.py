"""Training calls in a Python program that follows them: `python forms_program.py PLACE`, as test_forms.py runs it. A
`training.py` of the user's lies beside it."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import threestep

ROWS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(6) for b in range(4)]
SHARED: dict[str, Any] = {
    "report": False, "report_mfu": False, "per_device_train_batch_size": 4, "max_seq_len": 48, "learning_rate": 1e-2,
    "eval_interval": 1, "num_train_epochs": 4,
}  # fmt: skip
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def process_state() -> dict[str, Any]:
    import numpy
    import torch
    from transformers.utils import logging as transformers_logging

    umask = os.umask(0o022)
    os.umask(umask)
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    return {
        "hooks": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook],
        "signals": [signal.getsignal(number) for number in _SIGNALS],
        "levels": {name: one.level for name, one in loggers.items() if one.level} | {"": logging.root.level},
        "handlers": [logging.root.handlers[:], logging.raiseExceptions, transformers_logging.is_progress_bar_enabled()],
        "environment": dict(os.environ),
        "place": [os.getcwd(), sys.path[:], sys.argv[:], umask],
        "streams": [sys.stdin, sys.stdout, sys.stderr],
        "warnings": [warnings.filters[:], warnings.showwarning],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "random": [random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()],
        "torch": [
            torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.distributed.is_initialized(),
        ],
    }  # fmt: skip


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [f"{name}: {before[name]} -> {after[name]}"[:300] for name in before if before[name] != after[name]]


def main() -> None:
    import torch
    import transformers  # noqa: F401 (its loggers)

    place = Path(sys.argv[1])
    os.chdir(place)
    start, told = str(place / "start"), {}
    shared = {**SHARED, "data_output_path": str(place / "cache")}
    torch.set_num_threads(2)
    before = process_state()
    seen: list[tuple[int, list[str]]] = []

    def follow(step: int, figures: dict[str, float]) -> Any:
        seen.append((step, sorted(figures)))
        return "stop" if step == 3 else {"own/step": step}

    stopped = threestep.sft(start, iter(ROWS), eval_rows=iter(ROWS[:3]), callback=follow, run_name="followed", **shared)
    told["changed"] = changed(before, process_state())
    told["seen"], told["folder"] = seen, str(stopped.folder)
    told["held_out"] = json.loads((stopped.folder / "data_report.json").read_text())["eval"]["rows"]
    told["training_rows"] = json.loads((stopped.folder / "data_report.json").read_text())["train"]["rows"]
    told["steps"] = [line["step"] for line in stopped.metrics]
    told["own"] = [line.get("own/step") for line in stopped.metrics]
    told["html"] = stopped._repr_html_()
    try:
        threestep.sft(start, ROWS, callback=lambda step, figures: 1 / 0, **shared)
    except threestep.ThreestepError as mistake:
        told["mistake"] = str(mistake)
    told["changed_by_a_mistake"] = changed(before, process_state())
    early = {**shared, "early_stopping": 2, "learning_rate": 0.5, "save_every": 1, "keep_last": 0}
    early |= {"load_best_model_at_end": True}
    for name in ("unbroken", "broken"):
        result = threestep.sft(start, ROWS, output_dir=name, **early)
        told[name] = [result.figures["eval_loss_after"], [line["step"] for line in result.metrics]]
    told["rewards"] = rewarded(start, place)

    import training

    told["theirs"] = [training.MINE, os.path.realpath(training.__file__ or "")]
    told["ours"] = sorted(name for name in sys.modules if name.startswith("training."))
    (place / "told.json").write_text(json.dumps(told))


def rewarded(start: str, place: Path) -> list[Any]:
    """Calls of TRL's reward function: of its first, prompts, completions and columns."""
    calls: list[Any] = []

    def own(prompts: list[Any], completions: list[Any], level: list[int], **kwargs: Any) -> list[float]:
        calls.append([prompts[0], completions[0], level[0], sorted(kwargs)])
        return [float(len(one[0]["content"])) for one in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{a} + 1"}], "level": 7} for a in range(12)]
    threestep.ppo(
        start, rows, reward=own, advantage="grpo", num_samples_per_prompt=2, per_device_generation_batch_size=2,
        per_device_training_batch_size=4, max_answer_seq_len=4, max_prompt_seq_len=64, max_train_steps=1, report=False,
        report_mfu=False, data_output_path=str(place / "cache"),
    )  # fmt: skip
    return calls[0]


if __name__ == "__main__":
    main()
