"""The trainers and the properties of the table; imports nothing of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trainer:
    """title: a column's. adapter: module of `adapters`. environment: name of `environments`."""

    title: str
    adapter: str
    environment: str
    kinds: tuple[str, ...] = ("sft",)


@dataclass(frozen=True)
class Property:
    """kind: module of `properties` that has its function. claim: what a yes says. method: how it is seen."""

    kind: str
    claim: str


KINDS = {
    "sft": "Supervised fine-tuning",
    "dpo": "Direct preference optimization",
    "kto": "KTO, on responses marked one by one",
    "policy": "GRPO's losses, in the trainer",
    "functions": "Estimators and losses, as functions",
}
TRAINERS = {
    "threestep": Trainer("Threestep", "threestep", "threestep", ("sft", "dpo", "kto", "policy")),
    "transformers": Trainer("transformers Trainer", "hf", "trl116"),
    "trl-1.16": Trainer("TRL 1.16", "trl", "trl116", ("sft", "dpo", "kto", "policy")),
    "trl-0.24": Trainer("TRL 0.24", "trl", "trl024", ("sft", "dpo", "policy")),
    "trl-0.16": Trainer("TRL 0.16", "trl", "trl016", ("dpo", "policy")),
    "trl-0.12": Trainer("TRL 0.12", "trl", "trl012", ("sft", "dpo")),
    "llamafactory": Trainer("LLaMA-Factory", "llamafactory", "llamafactory", ("sft", "dpo")),
    "axolotl": Trainer("Axolotl", "axolotl", "axolotl", ("sft", "dpo")),
    "threestep-functions": Trainer("Threestep's functions", "threestep_functions", "threestep", ("functions",)),
    "verl": Trainer("verl 0.9", "verl", "verl", ("functions",)),
    "openrlhf": Trainer("OpenRLHF 0.11", "openrlhf", "verl", ("functions",)),
    "areal": Trainer("AReaL 1.0", "areal", "verl", ("functions",)),
}
PROPERTIES = {
    "accumulation": Property("sft", "the same gradient for 8x1, 4x2, 2x4 and 1x8 (micro-batch x accumulation)"),
    "padding_width": Property("sft", "the same gradient if rows are padded to 128 or 200 tokens"),
    "padding_side": Property("sft", "the same gradient if rows are padded on the left"),
    "packing": Property("sft", "the same gradient if conversations share rows"),
    "ranks": Property("sft", "the same gradient on one rank and on two"),
    "objective": Property("sft", "loss and update are those of the mean over all answer tokens of the step"),
    "whole_texts": Property("sft", "the same of texts, where every token but the first is learned"),
    "label_smoothing": Property("sft", "the same gradient for 8x1 and 2x4 under label smoothing"),
    "chat_tokens": Property(
        "sft", "of a chat with system prompt, tool call and two turns, the assistant's tokens alone carry loss"
    ),
    "truncated_rows": Property("sft", "rows that are cut carry loss on what is left of their answers, and no other"),
    "last_partial_batch": Property("sft", "an epoch's last, partial step has every remaining row at its right weight"),
    "resume": Property("sft", "a resumed run ends with the bits of the unbroken one"),
    "dpo_accumulation": Property("dpo", "the same gradient for 8x1, 4x2 and 2x4, that of the mean over pairs"),
    "dpo_loss": Property("dpo", "`sigmoid` is equation 7 of Rafailov et al. 2023"),
    "dpo_label_smoothing": Property("dpo", "with label smoothing 0.1, conservative DPO (Mitchell 2023)"),
    "dpo_hinge": Property("dpo", "`hinge` is max(0, 1 - beta margin)"),
    "dpo_ipo": Property("dpo", "`ipo` is equation 17 of Azar et al. 2023, on sums of log-ratios"),
    "dpo_last_partial_batch": Property("dpo", "an epoch's last, partial step is the mean over its pairs"),
    "kto_loss": Property("kto", "KTO's loss is equation 8 of Ethayarajh et al. 2024"),
    "kto_accumulation": Property("kto", "the same gradient for 8x1, 4x2 and 2x4, z being that of the step"),
    "grpo_sequence_mean": Property("policy", "`grpo`: the mean over responses of their means, for 8x1, 4x2 and 2x4"),
    "grpo_token_mean": Property("policy", "`dapo`: the mean over all tokens of the step, for 8x1, 4x2 and 2x4"),
    "grpo_constant": Property("policy", "`dr_grpo`: the sum over responses x longest, for 8x1, 4x2 and 2x4"),
    "grpo_bnpo": Property("policy", "`bnpo`: the mean over all tokens of the step, for 8x1, 4x2 and 2x4"),
    "group_advantages": Property("functions", "GRPO's advantages are (R - mean) / std of the group"),
    "equal_rewards": Property("functions", "equal rewards give advantages of 0"),
    "rloo": Property("functions", "RLOO's advantages are R - the mean of the others"),
    "gae_returns": Property("functions", "GAE's returns are those of Schulman et al. 2016"),
    "whiten": Property("functions", "whitening takes mean and deviation over the tokens that count"),
    "kl_k3": Property("functions", "k3 is exp(d) - d - 1, with its gradient"),
    "policy_loss": Property("functions", "PPO's clipped loss as a token mean is equation 7's, with its gradient"),
    "policy_split": Property("functions", "the same loss of a batch whole and in four micro-batches"),
}
