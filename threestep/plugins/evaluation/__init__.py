"""Finished models: prompts to answers, answers to scores, scores to figures; chats with them; the best of n answers."""

from training.utils.plugins.plugin import EVERY_STEP, LAUNCHED, Command, Hooks, Plugin, RunFile

PLUGIN = Plugin(
    "evaluation",
    "chat, evaluation and best-of-n sampling for finished models",
    needs=("pretraining_loss", "report", "serving"),
    commands={
        "chat": Command(f"{__name__}.chat", "chat with one model, or with two side by side"),
        "evaluate": Command(
            f"{__name__}.evaluate",
            "win rates, rewards, GSM8K, perplexity and benchmarks of finished models",
            LAUNCHED,
            ranks=1,
        ),
        "evaluate best_of": Command(
            f"{__name__}.best_of",
            "the best of n responses to each prompt, as rows for sft and dpo",
            LAUNCHED,
            ranks=1,
            earlier="best-of",
        ),
        "evaluate pairs": Command(
            f"{__name__}.reward_evaluation",
            "a reward model's accuracy on pairs, or the scores of a file's pairs",
            LAUNCHED,
            ranks=1,
            earlier="reward-evaluate",
        ),
    },
    flags={EVERY_STEP: (f"{__name__}.harness.arguments:RunTaskArguments",)},
    hooks=Hooks(
        check=f"{__name__}.harness.arguments:check_run_tasks",
        evaluation_observer=f"{__name__}.harness.online:open_tasks",
    ),
    tables={
        "evaluation_flags": {"harness_tasks": "add --harness_tasks"},
        "run_files": {"harness.json": RunFile(is_result=True)},
    },
)
