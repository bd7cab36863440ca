"""What a run leaves behind: the folder of DESIGN.md section 7."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

BAD_STEPS = "bad_steps.jsonl"
LOGS = ("metrics.jsonl", "samples.jsonl", BAD_STEPS)


class RunFolder:
    """Paths inside OUTPUT_DIR, and the small files in it. Only rank 0 writes."""

    def __init__(self, output_dir: str | Path, is_main_rank: bool) -> None:
        self.path = Path(output_dir)
        self.is_main_rank = is_main_rank
        if is_main_rank:
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_config(self, settings: dict[str, Any], comment: str) -> None:
        """Write every resolved setting to config.yaml, below one line of comment."""
        self._replace("config.yaml", f"# {comment}\n" + yaml.safe_dump(settings, sort_keys=True, allow_unicode=True))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the run's closing figures to summary.json."""
        self.write_json("summary.json", summary)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON object to the file `name`."""
        self._replace(name, json.dumps(content, indent=2) + "\n")

    def append_samples(self, samples: list[dict[str, Any]]) -> None:
        """Append one JSON object a line to samples.jsonl."""
        if not self.is_main_rank:
            return
        with open(self.path / "samples.jsonl", "a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")

    def log_sizes(self) -> dict[str, int]:
        """The bytes of each file that grows as the run goes on."""
        paths = [self.path / name for name in LOGS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def cut_logs(self, sizes: dict[str, int]) -> None:
        """Cut the files that grow back to what `log_sizes` gave; one that it does not name is removed."""
        if not self.is_main_rank:
            return
        for path in (self.path / name for name in LOGS):
            if path.name not in sizes:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])

    def _replace(self, name: str, text: str) -> None:
        if not self.is_main_rank:
            return
        beside = self.path / f".{name}.{os.getpid()}"
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path / name)
