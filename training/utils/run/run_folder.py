"""The files that a run leaves in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from training.utils.run.storage import replace_file

BAD_STEPS = "bad_steps.jsonl"
SAMPLE_PICTURES = "sample_pictures"  # a folder: small copies of the pictures that samples.jsonl names, NAME.png
METRICS = "metrics.jsonl"
DIVERGENCE = "divergence.jsonl"  # sentences on signs that the run has diverged
LOGS = (METRICS, "samples.jsonl", BAD_STEPS, DIVERGENCE)


class RunFolder:
    """Paths and small files in OUTPUT_DIR. Only rank 0 writes."""

    def __init__(self, output_dir: str | Path, is_main_rank: bool) -> None:
        self.path = Path(output_dir)
        self.is_main_rank = is_main_rank
        if is_main_rank:
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_config(self, settings: dict[str, Any], comment: str) -> None:
        """Write every resolved setting to config.yaml, below a comment line."""
        import yaml  # which --help does without

        self._write("config.yaml", f"# {comment}\n" + yaml.safe_dump(settings, sort_keys=True, allow_unicode=True))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON object to the file `name`."""
        self._write(name, json.dumps(content, indent=2) + "\n")

    def append_samples(self, samples: list[dict[str, Any]]) -> None:
        """Append one JSON object a line to samples.jsonl."""
        if not self.is_main_rank:
            return
        with open(self.path / "samples.jsonl", "a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")

    def write_picture(self, name: str, content: bytes) -> None:
        """Write one of `SAMPLE_PICTURES`. content: a PNG file."""
        if self.is_main_rank:
            (self.path / SAMPLE_PICTURES).mkdir(exist_ok=True)
            replace_file(self.path / SAMPLE_PICTURES / f"{name}.png", content)

    def log_sizes(self) -> dict[str, int]:
        """The bytes of each log, which grow during the run."""
        paths = [self.path / name for name in LOGS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def cut_logs(self, sizes: dict[str, int]) -> None:
        """Cut the logs back to the sizes that `log_sizes` gave; remove those that it does not name."""
        if not self.is_main_rank:
            return
        for path in (self.path / name for name in LOGS):
            if path.name not in sizes:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])

    def _write(self, name: str, text: str) -> None:
        if self.is_main_rank:
            replace_file(self.path / name, text)
