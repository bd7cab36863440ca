"""Optimizer steps that came out as NaN or infinite: counted, told with their rows, and at last the run's end.

The engine has skipped them by then: no weight has changed. Knows nothing of models and losses but the figures' names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.utils.run.errors import ThreestepError
from training.utils.run.fault_arguments import FaultArguments
from training.utils.run.metrics import say
from training.utils.run.run_folder import BAD_STEPS


class BadSteps:
    """output_dir: where `bad_steps.jsonl` goes; None writes nothing, as for a loop by itself. dtype: with "fp16" a
    skipped step whose loss is finite is DeepSpeed's search for a loss scale, and not counted."""

    def __init__(
        self,
        most: int = FaultArguments.max_bad_steps,
        output_dir: str | Path | None = None,
        is_main_rank: bool = True,
        dtype: str = "fp32",
    ) -> None:
        self.count = 0
        self._most = most
        self._path = None if output_dir is None else Path(output_dir) / BAD_STEPS
        self._is_main_rank = is_main_rank
        self._skip_is_bad = dtype != "fp16"

    def check(self, step: int, figures: Mapping[str, float], row_ids: Sequence[int]) -> None:
        """Count `step` where one of its figures .../loss or ..._loss is not finite, or .../skipped says so.

        figures: of one optimizer step, over all ranks, the same on each. row_ids: of its batch on all ranks. Raises
        ThreestepError, on every rank, where it is the last of so many.
        """
        what = {name: value for name, value in figures.items() if self._tells(name, value)}
        if not what:
            return
        self.count += 1
        told = ", ".join(f"{name} {value:g}" for name, value in what.items())
        if self._is_main_rank and self._path is not None:
            line = {
                "step": step,
                "figures": {name: str(value) for name, value in what.items()},
                "row_ids": list(row_ids),
            }
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        where = f"; the row ids of its batch are in {self._path}" if self._path is not None else ""
        if self.count >= self._most:
            raise ThreestepError(
                f"{self.count} optimizer step{'s' if self.count > 1 else ''} had a loss or a gradient that is no "
                f"finite number, which --max_bad_steps {self._most} takes for the end, the last of them step {step} "
                f"({told}){where}; no weight was changed by them: look at those rows, lower the learning rate, or "
                "train with --dtype fp32"
            )
        say(
            f"warning: step {step} was skipped, its loss or gradient is no finite number ({told}){where}; "
            f"{self.count} of --max_bad_steps {self._most}",
            self._is_main_rank,
        )

    def _tells(self, name: str, value: float) -> bool:
        if name.endswith("/skipped"):
            return self._skip_is_bad and value > 0
        return name.endswith(("/loss", "_loss")) and not math.isfinite(value)
