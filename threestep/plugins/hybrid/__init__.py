"""Rollouts with DeepSpeed's own engine, for comparison: `--rollout_engine hybrid`."""

from training.utils.plugins.plugin import EngineEntry, Plugin

PLUGIN = Plugin(
    "hybrid",
    "draws responses with DeepSpeed's engine",
    tables={
        "rollout_engines": {
            "hybrid": EngineEntry(f"{__name__}.engine:HybridRollout", note="DeepSpeed's engine, in training only")
        }
    },
)
