"""Optimizer steps with a loss or gradient that is not finite: counted, logged with their rows; too many end the run.

The engine has already skipped such a step: no weight has changed. Knows only the metrics' names of models and losses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.run.run_arguments import FaultArguments

if TYPE_CHECKING:
    from training.utils.run.run_folder import RunLog


@dataclass
class BadSteps:
    """lines: `bad_steps.jsonl`; None writes nothing, e.g. in tests.
    dtype: with "fp16", a skipped step with a finite loss is DeepSpeed searching for a loss scale, and is not counted.
    """

    most: int = FaultArguments.max_bad_steps
    lines: RunLog | None = None
    is_main_rank: bool = True
    dtype: str = "fp32"
    count: int = field(default=0, init=False)

    def check(self, step: int, figures: Mapping[str, float], row_ids: Sequence[int]) -> None:
        """Count `step` if one of its figures .../loss or ..._loss is not finite, or if .../skipped is set.

        figures: of one optimizer step, over all ranks, the same on each. row_ids: of its batch on all ranks. Raises
        ThreestepError, on every rank, at the last bad step that is allowed.
        """
        bad = {name: value for name, value in figures.items() if self._is_bad(name, value)}
        if not bad:
            return
        self.count += 1
        in_words = ", ".join(f"{name} {value:g}" for name, value in bad.items())
        where = ""
        if self.lines is not None:
            where = f"; the row ids of its batch are in {self.lines.path}"
            if self.is_main_rank:
                texts = {name: str(value) for name, value in bad.items()}
                line = {"step": step, "figures": texts, "row_ids": list(row_ids)}
                self.lines.append([json.dumps(line)])
        if self.count >= self.most:
            raise ThreestepError(
                f"{self.count} optimizer step{'s' if self.count > 1 else ''} had a non-finite loss or gradient, "
                f"which is the limit set by --max_bad_steps {self.most}; the last was step {step} "
                f"({in_words}){where}; the weights were left unchanged: check those rows, lower the learning rate, or "
                "train with --dtype fp32"
            )
        log(
            f"warning: step {step} was skipped: its loss or gradient is not finite ({in_words}){where}; {self.count} "
            f"of at most {self.most} (--max_bad_steps)",
            self.is_main_rank,
        )

    def _is_bad(self, name: str, value: float) -> bool:
        if name.endswith("/skipped"):
            return self.dtype != "fp16" and value > 0
        return name.endswith(("/loss", "_loss")) and not math.isfinite(value)
