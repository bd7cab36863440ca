"""The user's function that is called with each step's figures."""

from training.utils.plugins.plugin import EVERY_STEP, Plugin

PLUGIN = Plugin(
    "callback",
    "a user's function that is called with each step's metrics, and can add metrics or end training",
    flags={EVERY_STEP: (f"{__name__}.arguments:CallbackArguments",)},
    tables={"run_courses": {"callback": f"{__name__}.called:open_course"}},
)
