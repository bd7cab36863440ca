"""The result of a training call: the run's folder and figures, and the model, loaded on first use."""

from __future__ import annotations

import base64
import functools
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.process_state import silent_bars
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import parse_yaml
from training.utils.plugins.registry import plugin_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REWARD = "reward"


@dataclass(frozen=True)
class Result:
    """A finished run.

    kind: sft, reward, dpo, ppo, grpo or rloo
    folder: the run's --output_dir: config.yaml, metrics.jsonl, report.html, model/ and more
    figures: the content of summary.json: evaluations before and after training, and seconds; None without evaluation
        rows; empty after a dry run
    trusts_code: the run used trust_remote_code, so its model and tokenizer are loaded with it
    """

    kind: str
    folder: Path
    figures: dict[str, float | None]
    trusts_code: bool = False

    @property
    def model_folder(self) -> Path:
        """The model's folder, for `from_pretrained`. The next step's `model` also takes the result itself."""
        return self.folder / "model"

    def __fspath__(self) -> str:
        """The model's folder: a result is given as a model wherever a path is."""
        self._check_model()
        return str(self.model_folder)

    @property
    def report(self) -> Path | None:
        """Path of the run's report.html; None if there is none (report=False)."""
        page = self.folder / "report.html"
        return page if page.is_file() else None

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """The trained model on the CPU, in the precision it was saved in; loaded on first use. A reward model is an
        AutoModelForSequenceClassification. Raises ThreestepError if the run saved no model."""
        import transformers

        self._check_model()
        with silent_bars():
            kind: Any = transformers.AutoModelForCausalLM
            if self.kind == REWARD:
                kind = transformers.AutoModelForSequenceClassification
            return kind.from_pretrained(self.model_folder, dtype="auto", trust_remote_code=self.trusts_code)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with its chat template; loaded on first use. Raises ThreestepError without a model."""
        from training.utils.loading.tokenizers import read_tokenizer

        self._check_model()
        return read_tokenizer(self.model_folder, self.trusts_code)[0]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one per step, with the metric names used in TensorBoard."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def explain(
        self, step: int, *, update: int = 1, held_out: str = "", last: int = 1, rules: Sequence[str] = ()
    ) -> Any:
        """Explain an optimizer step, as `threestep audit explain` does, with the plugin `explain`. `.to_pandas()` has
        one row per token.

        update: the update within a ppo rollout. held_out: a file of responses. last: number of steps whose rows are
        ranked by their effect on these responses. rules: for example "advantage=rloo". A step that was not recorded is
        run again in FOLDER_explained."""
        parts = plugin_module("explain", "asked_step")
        work = self.folder.with_name(f"{self.folder.name}_explained")
        other = parts.AskedRules(tuple(rules))
        asked = parts.AskedStep(self.folder, step, update, last, held_out, other, work=work, trust_run=True)
        return parts.explanation_of(asked)  # this program called the run, whose code it is

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a result has no '{name}'; it has figures, folder, metrics, model, model_folder, report and tokenizer"
        )

    def __repr__(self) -> str:
        known = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items() if value is not None)
        return f"<{self.kind}: {known or 'no figures'}; in {self.folder}>"

    def _repr_html_(self) -> str:
        """The notebook view: the figures and the first chart of the report."""
        figures = [(name, value) for name, value in self.figures.items() if value is not None]
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td></tr>" for name, value in figures)
        where = html.escape(f"{self.kind}, in {self.report or self.folder}")
        return f'<p>{where}</p><div style="display:flex;gap:2em">{self._chart()}<table>{rows}</table></div>'

    def _chart(self) -> str:
        try:
            drawn = plugin_module("report", "png").first_chart(self.folder)
        except ThreestepError:  # a dry run's folder, or one that is gone; or the plugin is
            return ""
        if drawn is None:
            return ""
        title, png = drawn
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        return f'<img alt="{html.escape(title)}" src="{source}" style="max-width:30em">'

    def _check_model(self) -> None:
        if not (self.model_folder / "config.json").is_file():
            raise ThreestepError(
                f"the run in {self.folder} has no model, because dry_run and val_only do not train one"
            )


def result_of(kind: str, folder: Path) -> Result:
    """Read the files of a run."""
    path, config = folder / "summary.json", folder / "config.yaml"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings = parse_yaml(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return Result(kind, folder, figures, settings.get("trust_remote_code") is True)
