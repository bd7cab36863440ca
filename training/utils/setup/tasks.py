"""Opens the tasks of lm-evaluation-harness that a run's evaluations have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.data.chat.arguments import CHAT_TEMPLATE
from training.utils.loading.configurations import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.engine.whole_model import WholeModel
    from training.utils.harness.online import OnlineTasks
    from training.utils.report.arguments import ReportArguments
    from training.utils.setup.opened_run import OpenedRun


def open_tasks(
    flags: ReportArguments, run: OpenedRun, whole: WholeModel, tokenizer: PreTrainedTokenizerBase, *, batch: int
) -> OnlineTasks:
    """Return the tasks of `--harness_tasks`, which ask by the chat template where the run's rows have it. batch: of
    requests."""
    from training.utils.harness.online import AskedOnline, OnlineTasks
    from training.utils.harness.running import AskedModel, AskedTasks

    if not flags.harness_tasks:
        return OnlineTasks()
    templated = run.plan.settings["prompt_style"] == CHAT_TEMPLATE
    template = run.flags.data.chat.template_kwargs if templated else None
    asked = AskedModel(tokenizer, template, positions_of(whole.model.config), batch)
    tasks = AskedTasks("--harness_tasks", flags.harness_tasks, rows=flags.harness_rows)
    return AskedOnline(whole, asked, tasks, run.folder)
