"""The schema of a record: every tensor, setting and figure by its name. threestep/plugins/audit/README.md has the same
in words.

A record is a folder: record.json, rank0.safetensors and one such file for each further rank, and state.safetensors.
Everything is optional but the schema and the objective. Cheap to import.

S sequences of a rank, T their tokens one after the other, V vocabulary, P pairs of sequences, K micro-batches,
B responses of a rollout, R their drawn tokens one after the other, I media of all sequences, X their values.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA, VERSION = "threestep-record", 1
OBJECTIVES = ("sft", "reward", "dpo", "policy")
DESCRIPTION, STATE = "record.json", "state.safetensors"
DIGESTS, DIGESTS_VERSION = "digests.jsonl", 1
LAYERS_EVERY = 4  # steps, and the first: those whose gradients and weights are in digests.jsonl
# Of the files of layers beside a record, as the data flow.
TRACED = ("weights before", "forward", "backward", "gradient of a rank", "gradient", "weights after")


def layers_file(model: str, rank: int) -> str:
    return f"layers_{model}_rank{rank}.json"


@dataclass(frozen=True)
class RecordField:
    """axis: S, T, TV, P, K, B or R. kind: of number: i integers, b booleans, f floating point."""

    axis: str
    kind: str
    meaning: str


# Of a rank's file. A number of a token stands at the token itself, not at the one that predicts it.
TENSORS = {
    "lengths": RecordField("S", "i", "tokens of each sequence, with its padding if the rows were padded"),
    "rows": RecordField("S", "i", "the row in the dataset"),
    "numbers": RecordField("S", "i", "the number of the response in the rollout, over all ranks"),
    "micro_batches": RecordField("S", "i", "the micro-batch of this rank, from 0"),
    "token_ids": RecordField("T", "i", "token ids"),
    "is_real": RecordField("T", "b", "False on padding"),
    "data_mask": RecordField("T", "b", "True where the data marks loss: responses with their end token"),
    "loss_mask": RecordField("T", "b", "True where the trainer counted loss"),
    "logits": RecordField("TV", "f", "the logits that predict each token, before the temperature"),
    "logprobs": RecordField("T", "f", "log-probabilities of the trained model, 0 where none was read"),
    "token_losses": RecordField("T", "f", "the loss of each token before any mean"),
    "old_logprobs": RecordField("T", "f", "log-probabilities of the policy that rolled out, as the loss received them"),
    "ref_logprobs": RecordField("T", "f", "log-probabilities of the reference"),
    "advantages": RecordField("T", "f", "advantages as the loss received them"),
    "corrections": RecordField("T", "f", "weights that correct a mismatch between rollout and training"),
    "selected": RecordField("T", "b", "True where KL-Cov or Clip-Cov treats the token separately"),
    "new_values": RecordField("T", "f", "the critic's values in this step"),
    "old_values": RecordField("T", "f", "the critic's values at the rollout"),
    "returns": RecordField("T", "f", "the returns that the critic learns"),
    "scores": RecordField("S", "f", "the reward model's scores in this step"),
    "logprob_sums": RecordField(
        "S", "f", "the log-probability of each response; tokens beyond the shortest have the weight `ld_alpha`"
    ),
    "ref_logprob_sums": RecordField("S", "f", "the log-probability of each response by the reference"),
    "chosen": RecordField("P", "i", "the better sequence of each pair, an index into this rank's"),
    "rejected": RecordField("P", "i", "the worse sequence of each pair"),
    "pair_weights": RecordField("P", "f", "each pair's weight; absent: 1"),
    "is_good": RecordField("S", "b", "the mark of each response that is not part of a pair"),
    "mismatched_ratios": RecordField(
        "S", "f", "log-ratios of prompts with the responses of other rows, whose mean is kto's point"
    ),
    "reference_points": RecordField("K", "f", "kto's point, if each micro-batch has its own"),
    "margins": RecordField("P", "f", "the data's margin of each pair"),
    "pair_losses": RecordField("P", "f", "the loss of each pair"),
    "micro_losses": RecordField("K", "f", "the part of the loss that each micro-batch added"),
    "media_begins": RecordField("I", "i", "the place in T of each medium's first token"),
    "media_tokens": RecordField("I", "i", "the number of tokens of each"),
    "media_counts": RecordField("I", "i", "the number of `media_values` of each"),
    "media_grids": RecordField("IG", "i", "frames, height and width of each, in patches"),
    "media_cuts": RecordField("IG", "i", "tiles, height and width of each"),
    "media_values": RecordField("XN", "f", "what the model received for all of them, flattened: patches, or tiles"),
    "rollout_numbers": RecordField("B", "i", "the number of the response, over all ranks"),
    "rollout_groups": RecordField("B", "i", "equal for the responses to one prompt"),
    "rollout_batches": RecordField(
        "B", "i", "equal for responses that are whitened or normalized together; absent: all are"
    ),
    "rollout_lengths": RecordField("B", "i", "the number of drawn tokens of each response"),
    "rollout_counts": RecordField("B", "b", "False where the response is left out of the loss"),
    "rollout_ended": RecordField("B", "b", "False where the length limit cut the response"),
    "rollout_scores": RecordField("B", "f", "the score of each response, which is the reward of its last token"),
    "rollout_greedy_scores": RecordField("B", "f", "the score of the greedy response to the same prompt"),
    "rollout_policy_logprobs": RecordField(
        "R", "f", "log-probabilities of the policy that rolled out, for the optimal token baseline"
    ),
    "rollout_collisions": RecordField("R", "f", "the sum of p^2 over the vocabulary, of the same policy"),
    "rollout_corrections": RecordField("R", "f", "weights that correct a mismatch between rollout and training"),
    "rollout_sampling_logprobs": RecordField("R", "f", "log-probabilities as the rollout engine gave them"),
    "rollout_old_logprobs": RecordField(
        "R", "f", "log-probabilities of the policy that rolled out, from the training forward pass"
    ),
    "rollout_ref_logprobs": RecordField("R", "f", "log-probabilities of the reference"),
    "rollout_values": RecordField("R", "f", "the critic's values"),
    "rollout_rewards": RecordField("R", "f", "rewards of each token, with the KL if it is part of the reward"),
    "rollout_advantages": RecordField("R", "f", "advantages as they go into the loss, whitened if whitening is on"),
    "rollout_returns": RecordField("R", "f", "returns before whitening"),
}
# Of state.safetensors, followed by a parameter's name: of the whole model, over all ranks.
STATES = {
    "gradients.": "gradients of the step's loss, before clipping",
    "clipped_gradients.": "gradients as the optimizer received them",
    "weights_before.": "weights before the step, including frozen ones if the values are recorded",
    "weights_after.": "weights after the step",
    "exp_avg.": "Adam's first moment before the step",
    "exp_avg_sq.": "Adam's second moment before the step",
    "exp_avg_after.": "Adam's first moment after the step, which shows the gradient that the optimizer received",
}
CRITIC = "critic_"  # begins what a record has of the critic as of the actor
STATES |= {f"{CRITIC}{name}": f"the same of the critic: {meaning}" for name, meaning in STATES.items()}
# Values: the type, or the words that are possible.
SCHEDULES = ("constant", "linear", "cosine", "wsd", "cosine_with_restarts", "polynomial", "inverse_sqrt")
SETTINGS: dict[str, tuple[type | tuple[str, ...], str]] = {
    "reduction": (
        ("token mean", "sequence mean", "sequence sum", "sequence sum norm"),
        "how losses of tokens become one number, for sft and policy",
    ),
    "accumulation_steps": (float, "micro-batches per rank in a whole step; this step may have fewer"),
    "longest_tokens": (float, "the constant of `sequence sum norm`"),
    "preference_loss": (
        (
            *("sigmoid", "sigmoid_norm", "robust", "ipo", "hinge", "apo_zero", "apo_down"),
            *("simpo", "cpo", "orpo", "sft", "plackett_luce", "kto", "bco"),
        ),
        "the loss of dpo",
    ),
    "preference_terms": (str, "a sum of losses: comma-separated NAME:WEIGHT pairs, in place of preference_loss"),
    "beta": (float, "beta of dpo, in this step"),
    "first_beta": (float, "beta in the first step, if it has a schedule"),
    "final_beta": (float, "beta in the last step, if it has a schedule"),
    "beta_schedule": (("linear", "cosine"), "the schedule of beta between them"),
    "simpo_gamma": (float, "simpo's margin"),
    "cpo_alpha": (float, "weight of the likelihood in cpo"),
    "ld_alpha": (float, "weight of tokens beyond a prompt's shortest response (LD-DPO); absent: 1"),
    "desirable_weight": (float, "weight of good responses, in kto"),
    "undesirable_weight": (float, "weight of bad responses, in kto"),
    "longest_row": (float, "the maximum number of tokens per row; longer rows are cut"),
    "cut": (("begin", "end"), "the end that is cut off"),
    "label_smoothing": (float, "label smoothing of the pairs' loss"),
    "margin_scale": (float, "factor of the margins, for reward"),
    "center_coef": (float, "weight of (chosen + rejected)^2, for reward"),
    "begin_token_id": (float, "the token that begins sequences; -1: none"),
    "end_token_id": (float, "the token that ends a response"),
    "template_prompt": (str, "the ids, separated by spaces, that the chat template adds at the beginning"),
    "system_prompt": (
        ("of the data", "of the template"),
        "the system prompt that is wanted for rows without one; absent: either",
    ),
    "z_loss_coef": (float, "weight of the mean of log^2 Z, for sft"),
    "embedding_noise": (float, "NEFTune's alpha, for sft"),
    "other_terms": (bool, "the loss has terms that a record has no name for"),
    "other_critic_terms": (bool, "the critic's loss has terms that a record has no name for"),
    "temperature": (float, "the number that divides the logits"),
    "advantage": (
        (
            *("gae", "grpo", "rloo", "grpo_passk", "reinforce++", "reinforce++_baseline", "remax", "opo", "gpg"),
            *("optimal_token_baseline", "tir_optimal_token_baseline"),
        ),
        "the estimator",
    ),
    "zero_tail": (bool, "the optimal token baseline is 0 where one response of a group continues alone"),
    "policy_loss": (
        ("ppo", "gspo", "cispo", "geo_mean", "sapo", "gpg", "kl_cov", "clip_cov"),
        "the policy loss; absent: ppo",
    ),
    "sapo_tau_pos": (float, "SAPO's temperature where the advantage is above 0"),
    "sapo_tau_neg": (float, "elsewhere"),
    "kl_cov_coef": (float, "KL-Cov's penalty on selected tokens"),
    "cov_share": (float, "share of tokens that KL-Cov and Clip-Cov select"),
    "clip_cov_low": (float, "the smallest covariance of a token that Clip-Cov may draw"),
    "clip_cov_high": (float, "the largest one"),
    "entropy_coef": (float, "weight of the policy's entropy in the loss"),
    "mismatch_correction": (("truncate", "mask"), "weights that correct a mismatch between rollout and training"),
    "mismatch_level": (("token", "sequence", "geometric"), "the level of the ratio that gives them"),
    "mismatch_threshold": (float, "their upper bound"),
    "mismatch_threshold_lower": (float, "their lower bound"),
    "mismatch_normalize": (bool, "they are divided by their mean"),
    "gamma": (float, "discount of GAE"),
    "lam": (float, "lambda of GAE"),
    "norm_by": (("group", "batch", "none"), "the responses whose standard deviation divides the advantages"),
    "std_ddof": (float, "1: the variance has the denominator n - 1"),
    "std_epsilon": (float, "added to the standard deviation"),
    "whiten": (bool, "advantages are whitened over the tokens that count"),
    "kl_estimator": (("k1", "k2", "k3", "abs"), "the estimator of the KL to the reference"),
    "kl_gradient": (("+",), "the gradient is k2's, whatever the value is"),
    "kl_bound": (float, "the largest k3 of a token; absent: any"),
    "kl_weighted": (bool, "the KL in the loss is multiplied by the ratio"),
    "kl_in": (("reward", "loss", "none"), "where the KL counts"),
    "kl_coef": (float, "its coefficient"),
    "ratio": (
        ("token", "sequence sum", "sequence mean"),
        "the unit of the ratio: a token, a whole response or its mean; absent: token",
    ),
    "clip_low": (float, "the lower bound of the ratio is 1 - clip_low"),
    "clip_high": (float, "the upper bound of the ratio is 1 + clip_high"),
    "dual_clip": (float, "where the advantage is negative, the loss is at most this times its size; absent: no bound"),
    "clip_value": (float, "how far a value may move from the old one"),
    "max_grad_norm": (float, "the norm that gradients are clipped to; 0: not clipped"),
    "beta1": (float, "AdamW's beta1"),
    "beta2": (float, "AdamW's beta2"),
    "adam_epsilon": (float, "AdamW's epsilon"),
    "weight_decay": (float, "AdamW's weight decay, on matrices"),
    "updates_before": (float, "AdamW's updates before this one"),
    "schedule": (SCHEDULES, "the schedule of the learning rate after the warm-up"),
    "peak_learning_rate": (float, "its largest value"),
    "adapter_learning_rate": (float, "the same for LoRA's adapters; absent: the same value"),
    "init_lr_ratio": (float, "share of the peak at which warm-up begins"),
    "min_lr_ratio": (float, "the smallest share of the peak after the warm-up"),
    "num_cycles": (float, "cycles of the cosine; absent: 0.5"),
    "stable_ratio": (float, "share of the steps after warm-up in which wsd stays at the peak"),
    "dtype": (("fp32", "bf16", "fp16"), "the dtype of the model's forward and backward pass"),
    "master_dtype": (("fp32", "bf16"), "the dtype of the weights that the optimizer updates"),
    "dropout": (float, "the largest dropout rate in the model"),
    "warmup_steps": (float, "warm-up steps of the schedule"),
    "total_steps": (float, "all steps of the schedule"),
    "logprob_rounding": (float, "the most that rounding changes a log-probability, in nats; absent: 1e-5"),
    "loss_rounding": (float, "relative rounding of recorded losses; absent: float32's"),
}
FIGURES = {
    "loss": "the loss of the step, over all ranks and micro-batches",
    "backward_loss": "the same loss as it entered the backward pass",
    "denominator": "the number that the sum of the losses was divided by",
    "beta": "beta of dpo, as the loss received it",
    "reference_point": "the point that marked responses are compared with: z of kto, d of bco",
    "policy_loss": "the policy's part of the actor's loss",
    "kl_loss": "the KL's part of the loss, before its coefficient",
    "value_loss": "the critic's loss",
    "grad_norm": "the gradient norm before clipping",
    "learning_rate": "the learning rate of the step",
    "critic_grad_norm": "the critic's gradient norm before clipping",
    "critic_learning_rate": "the critic's learning rate",
}
