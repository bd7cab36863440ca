"""The pretraining loss of step 3: text without prompts, in blocks, that the actor learns from beside its rollouts."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "pretraining_loss",
    "text in blocks, and step 3's pretraining loss on it",
    flags={"step3_ppo": (f"{__name__}.arguments:TextArguments", f"{__name__}.arguments:PretrainingArguments")},
    tables={
        "advice": {"unsupervised_dataset_name": {"plain_text": "as --unsupervised_dataset_name"}},
        "learnt_beside": {"unsupervised_dataset_name": f"{__name__}.learnt_texts:learnt_texts"},
    },
)
