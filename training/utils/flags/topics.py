"""Topics of flags, under which `--help` lists them. Knows no flag."""

from __future__ import annotations

OTHER = "task"  # of flags whose group names no topic
# In the order of `--help all`.
TOPICS = {
    OTHER: "This command",
    "model": "Models and tokenizers",
    "data": "Which data",
    "columns": "Columns of data files",
    "split": "Which rows train and which evaluate",
    "length": "Lengths and truncation",
    "chat": "Prompts, chat templates, and where a response ends",
    "batch": "Batches and the length of training",
    "optimizer": "Optimizer and learning rate",
    "loss": "The loss",
    "rollout": "How responses are drawn",
    "reward": "What scores a response",
    "advantage": "Advantages",
    "kl": "KL divergence to the reference",
    "policy": "Losses of the policy and the critic",
    "mismatch": "Correction where rollout and training differ",
    "evaluation": "Evaluation",
    "lora": "LoRA adapters",
    "memory": "Precision, memory and speed",
    "checkpoints": "Checkpoints and resuming",
    "log": "Log, report and trackers",
    "run": "The run: folder, seed, ranks, dry run, failures",
    "cache": "Cache of tokenized data",
}
