"""The result of a training call: the run's folder and figures, and the model, which is loaded on first use."""

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

    kind: sft, reward, dpo or ppo
    folder: the run's --output_dir: config.yaml, metrics.jsonl, report.html, model/ and more
    figures: those of summary.json: evaluations before and after, seconds; None where there were no evaluation rows;
        empty after a dry run
    trusts_code: the run had trust_remote_code, and so have its model and tokenizer
    """

    kind: str
    folder: Path
    figures: dict[str, float | None]
    trusts_code: bool = False

    @property
    def model_folder(self) -> Path:
        """Folder of the model, for `from_pretrained` and the next step's `model`."""
        return self.folder / "model"

    @property
    def report(self) -> Path | None:
        """The page about the run, report.html; None without one (report=False)."""
        page = self.folder / "report.html"
        return page if page.is_file() else None

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """The trained model in the precision that it was saved in, on the CPU; loaded at the first use. A reward model
        is an AutoModelForSequenceClassification. ThreestepError if the run left none."""
        import transformers

        self._check_model()
        with silent_bars():
            kind: Any = transformers.AutoModelForCausalLM
            if self.kind == REWARD:
                kind = transformers.AutoModelForSequenceClassification
            return kind.from_pretrained(self.model_folder, dtype="auto", trust_remote_code=self.trusts_code)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with its chat template; loaded at the first use. ThreestepError as of `model`."""
        from training.utils.loading.tokenizers import read_tokenizer

        self._check_model()
        return read_tokenizer(self.model_folder, self.trusts_code)[0]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one a step, under TensorBoard's names."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def explain(
        self, step: int, *, update: int = 1, held_out: str = "", last: int = 1, rules: Sequence[str] = ()
    ) -> Any:
        """Explain an optimizer step, as `threestep audit explain` does, with the plugin `explain`. `.to_pandas()` has a
        row for each token.

        update: of a rollout of ppo. held_out: a file of responses. last: steps whose rows are ordered by what they
        taught these. rules: such as "advantage=rloo". A step without a record is run again in FOLDER_explained."""
        parts = plugin_module("explain", "asked")
        work = self.folder.with_name(f"{self.folder.name}_explained")
        other = parts.AskedRules(tuple(rules))
        asked = parts.AskedStep(self.folder, step, update, last, held_out, other, work=work, trust_run=True)
        return parts.explanation_of(asked)  # this program called the run, whose code it is

    def __repr__(self) -> str:
        known = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items() if value is not None)
        return f"<{self.kind}: {known or 'no figures'}; in {self.folder}>"

    def _repr_html_(self) -> str:
        """A notebook's view: the figures, and the first chart of the report."""
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
            raise ThreestepError(f"the run in {self.folder} has no model: dry_run and val_only train none")


def result_of(kind: str, folder: Path) -> Result:
    """Read the files of a run."""
    path, config = folder / "summary.json", folder / "config.yaml"
    figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings = parse_yaml(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return Result(kind, folder, figures, settings.get("trust_remote_code") is True)
