"""The flags of what tells of a run: trackers while it goes on, and the page at its end. Cheap to import."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.utils.run.errors import Mistakes, nearest_names

NOBODY = "none"
# The services and the package that each needs. None is told of a run unless it is asked for; TensorBoard is no service:
# it reads the run's folder.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


@dataclass
class ReportArguments:
    """Who is told of a run's figures. metrics.jsonl is always written."""

    report_to: str = field(
        default="tensorboard",
        metadata={
            "help": f"Who is told of the metrics, with commas: {', '.join(PACKAGES)}; or {NOBODY}. wandb, trackio and "
            "mlflow are set up by their own environment variables."
        },
    )
    report: bool = field(default=True, metadata={"help": "Write OUTPUT_DIR/report.html at the end of the run."})

    def validate(self, mistakes: Mistakes) -> None:
        """Note names that nothing has, and packages that are not installed."""
        names = [word.strip() for word in self.report_to.split(",")]
        for name in names:
            if name == NOBODY and len(names) == 1:
                continue
            if name not in PACKAGES:
                wanted = f"{', '.join(PACKAGES)}, with commas, or {NOBODY} alone"
                mistakes.add(f"--report_to expects {wanted}; got '{name}'{nearest_names(name, PACKAGES)}")
            elif importlib.util.find_spec(PACKAGES[name]) is None:
                mistakes.add(f"--report_to {name} needs the package {PACKAGES[name]}: pip install {PACKAGES[name]}")


def trackers_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a run's --report_to, each once."""
    words = str(settings.get("report_to", ReportArguments.report_to)).split(",")
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip() != NOBODY))
