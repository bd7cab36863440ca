"""Where the maintainers of a trainer speak of a cell that is no: (trainer, property) to the thread and what it says."""

from __future__ import annotations

HF = "https://github.com/huggingface/transformers"
TRL = "https://github.com/huggingface/trl"
ACCUMULATED = "the mean over micro-batches of their means; its trainer sets `model_accepts_loss_kwargs` to False here"
SHIFTED = "the count of tokens has one more for each row, mended since"
SMOOTHED = "the smoothed loss ignores the count of the step, mended since"
AVERAGED = "averages log-likelihoods over tokens, on the word of the paper's authors"
PAIR_MEANS = "the mean over micro-batches of their means over pairs"
UNNAMED = "its trainer calls TRL's `dpo_loss` without the loss's name, so that the loss is `sigmoid`"
IPO = ("threestep", "trl-1.16", "trl-0.24", "trl-0.16", "trl-0.12", "axolotl")
THREADS: dict[tuple[str, str], tuple[str, str]] = {
    **{
        ("axolotl", name): ("", ACCUMULATED)
        for name in ("accumulation", "ranks", "objective", "whole_texts", "label_smoothing", "last_partial_batch")
    },
    ("trl-0.24", "whole_texts"): (f"{HF}/pull/46204", SHIFTED),
    ("trl-0.24", "label_smoothing"): (f"{HF}/issues/46731", SMOOTHED),
    ("trl-0.12", "label_smoothing"): (f"{HF}/issues/46731", SMOOTHED),
    ("llamafactory", "label_smoothing"): (f"{HF}/issues/46731", SMOOTHED),
    **{(name, "dpo_ipo"): (f"{TRL}/pull/1265", AVERAGED) for name in IPO},
    ("axolotl", "dpo_label_smoothing"): ("", "TRL 1.9 documents the setting for `robust` and `exo_pair` alone"),
    ("trl-1.16", "dpo_label_smoothing"): ("", "the setting is documented for `robust` and `exo_pair` alone"),
    ("llamafactory", "dpo_hinge"): ("", UNNAMED),
    ("llamafactory", "dpo_ipo"): ("", f"{UNNAMED}, of means over tokens"),
    ("llamafactory", "dpo_last_partial_batch"): ("", PAIR_MEANS),
    ("axolotl", "dpo_last_partial_batch"): ("", PAIR_MEANS),
    ("trl-1.16", "kto_accumulation"): (f"{TRL}/pull/2153", "z is each micro-batch's own, on purpose"),
    ("trl-1.16", "dpo_last_partial_batch"): ("", PAIR_MEANS),
    ("trl-0.24", "dpo_last_partial_batch"): ("", PAIR_MEANS),
    ("threestep", "dpo_last_partial_batch"): (
        "",
        "a step takes its pairs exactly: those that fill no whole step are left out",
    ),
    ("threestep", "last_partial_batch"): (
        "",
        "a step takes its sequences exactly: the rows that fill no whole step are left out",
    ),
    ("trl-0.12", "dpo_accumulation"): (f"{TRL}/pull/2615", "the loss was not divided by the accumulation"),
    ("trl-0.12", "chat_tokens"): ("", "its collator pairs turns of user and assistant; a tool breaks them"),
    ("trl-1.16", "grpo_bnpo"): ("", "documented: the mean is over the tokens of the local batch"),
    ("trl-0.24", "grpo_bnpo"): ("", "documented: the mean is over the tokens of the local batch"),
    ("trl-0.16", "grpo_sequence_mean"): ("", "its one loss is the mean over the tokens of a micro-batch"),
    ("llamafactory", "truncated_rows"): ("", "prompt and answer are cut each: no beginning of the uncut row"),
    ("verl", "equal_rewards"): (
        "https://github.com/verl-project/verl/pull/4597",
        "the mean in float32 is not the reward",
    ),
}
