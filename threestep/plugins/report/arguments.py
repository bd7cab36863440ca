"""The flags of the page about a run, and of its model's upload. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class ReportArguments:
    """The page that a run leaves, and whether its model goes to the hub."""

    topic: ClassVar[str] = "log"
    may_change: ClassVar[bool] = True

    report: bool = flag(True, "Write OUTPUT_DIR/report.html at the end of the run.")
    push_to_hub: bool = flag(False, "Upload OUTPUT_DIR/model with its model card to the hub at the end of the run.")
    hub_model_id: str | None = flag(
        None,
        "With --push_to_hub: repository to upload to, OWNER/NAME; created if missing. Default: the name of "
        "--output_dir under the logged-in account.",
    )
    hub_private_repo: bool | None = flag(
        None, "With --push_to_hub: make the repository private; default: the organization's setting."
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Collect an upload's name without an upload."""
        mistakes.require(
            self.push_to_hub or not self.hub_model_id,
            f"--hub_model_id {self.hub_model_id} needs --push_to_hub, which is off; add --push_to_hub, or leave "
            "--hub_model_id out",
        )
