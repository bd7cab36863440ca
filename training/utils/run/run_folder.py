"""The files that a run leaves in its folder: those that it needs to begin, and those that it can end without."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.utils.base.console import log
from training.utils.base.credentials import redacted_value
from training.utils.base.disk_errors import in_words
from training.utils.base.storage import replace_file
from training.utils.contracts.media_names import SAMPLE_MEDIA
from training.utils.flags.auto import marked
from training.utils.plugins.registry import added
from training.utils.run.run_log import RunLog

BAD_STEPS = "bad_steps.jsonl"
METRICS = "metrics.jsonl"
DIVERGENCE = "divergence.jsonl"  # sentences on signs that the run has diverged
ROLLOUTS = "rollouts.jsonl"  # which weights drew what, and what became of each prompt
LOGS = (METRICS, "samples.jsonl", BAD_STEPS, DIVERGENCE, ROLLOUTS)


def log_names() -> tuple[str, ...]:
    """The files of a run to which its steps append: `LOGS`, and those of plugins. A run that resumes cuts them back."""
    return (*LOGS, *added("logs", LOGS))


class EndedRun(NamedTuple):
    """A run that has written its models and figures. settings: by the flags' names. trains: it was more than an
    evaluation."""

    folder: RunFolder
    settings: Mapping[str, Any]
    trains: bool


class RunFolder:
    """Paths and small files in OUTPUT_DIR. Only rank 0 writes."""

    def __init__(self, output_dir: str | Path, is_main_rank: bool) -> None:
        self.path = Path(output_dir)
        self.is_main_rank = is_main_rank
        self._logs: dict[str, RunLog] = {}
        self._refused: dict[str, str] = {}  # texts of small files that the disk refused, by name
        self._lost_media = Counter[str]()
        if is_main_rank:
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_config(self, settings: dict[str, Any], comment: str, chosen: Collection[str] = ()) -> None:
        """Write every resolved setting to config.yaml, below a comment line. chosen: as of `marked`."""
        import yaml  # which --help does without

        text = yaml.safe_dump(redacted_value(settings), sort_keys=True, allow_unicode=True)
        self._write("config.yaml", f"# {comment}\n{marked(text, chosen)}")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write one JSON object to the file `name`."""
        self._write(name, json.dumps(redacted_value(content), indent=2) + "\n")

    def write_figures(self, name: str, content: dict[str, Any]) -> None:
        """As `write_json`, for results of training: if the disk refuses them, warn, and try once more in `settle`."""
        text = json.dumps(redacted_value(content), indent=2) + "\n"
        try:
            self._write(name, text)
        except OSError as problem:
            self._refused[name] = text
            log(f"warning: {self.path / name} cannot be written ({problem.strerror}); it is tried again at the end")

    def run_log(self, name: str) -> RunLog:
        """One of `log_names`, always the same object."""
        return self._logs.setdefault(name, RunLog(self.path / name))

    def append_samples(self, samples: list[dict[str, Any]]) -> None:
        """Append one JSON object a line to samples.jsonl, now or once the disk takes it."""
        if self.is_main_rank:
            self.run_log("samples.jsonl").append(json.dumps(sample, ensure_ascii=False) for sample in samples)

    def write_medium(self, name: str, content: bytes, kind: str) -> None:
        """Write a file of `SAMPLE_MEDIA`, unless the disk refuses it. kind: a word for it."""
        if not self.is_main_rank:
            return
        try:
            (self.path / SAMPLE_MEDIA).mkdir(exist_ok=True)
            replace_file(self.path / SAMPLE_MEDIA / name, content)
        except OSError as problem:
            if not self._lost_media:
                log(f"warning: a {kind} of samples cannot be written ({in_words(problem)}); training goes on")
            self._lost_media[kind] += 1

    def settle(self) -> None:
        """At the end of a run, after its model: try once more to write what the disk refused; log what is lost."""
        for one in self._logs.values():
            one.settle()
        for name, text in self._refused.items():
            try:
                self._write(name, text)
            except OSError as problem:
                log(f"warning: {self.path / name} is lost ({problem.strerror})")
        for kind, lost in self._lost_media.items():
            log(f"warning: {lost:,} {kind}s of {self.path / SAMPLE_MEDIA} are lost")
        self._refused, self._lost_media = {}, Counter()

    def log_sizes(self) -> dict[str, int]:
        """The bytes of each log, which grow during the run."""
        paths = [self.path / name for name in log_names()]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def cut_logs(self, sizes: dict[str, int]) -> None:
        """Cut the logs back to the sizes that `log_sizes` gave; remove those that it does not name."""
        if not self.is_main_rank:
            return
        for path in (self.path / name for name in log_names()):
            if path.name not in sizes:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])

    def _write(self, name: str, text: str) -> None:
        if self.is_main_rank:
            replace_file(self.path / name, text)
