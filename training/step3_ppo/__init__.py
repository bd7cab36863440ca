"""Step 3: reinforcement learning with PPO and related algorithms."""

from __future__ import annotations

from typing import get_type_hints

from training.step3_ppo.flags.ppo_flags import PpoFlags
from training.utils.data.arguments import SENTENCE_FLAGS
from training.utils.flags.step import SPEED, ClosingRow, Curve, Headline, SampleWords, Step, StepFigures, added_curves

STEP = Step(
    name="step3_ppo",
    label="PPO",
    title="PPO",
    groups=tuple(get_type_hints(PpoFlags).values()),
    reads_media=True,
    unread=(*SENTENCE_FLAGS, "max_seq_len", "truncation", "margin_column"),
    first_flags=(
        "actor_model_name_or_path",
        "critic_model_name_or_path",
        "data_path",
        "output_dir",
        "max_prompt_seq_len",
        "max_answer_seq_len",
        "per_device_generation_batch_size",
        "num_samples_per_prompt",
        "per_device_training_batch_size",
        "actor_learning_rate",
        "critic_learning_rate",
        "num_train_epochs",
        "advantage",
        "reward",
        "num_ranks",
        "config",
    ),
    inputs={"actor_model_name_or_path": "step1_sft", "critic_model_name_or_path": "step2_reward"},
    variant=("advantage", "{}"),
    figures=StepFigures(
        curves=(
            Curve(
                "Reward",
                "mean score per response",
                {
                    "rollouts": "rollout/score",
                    "with the KL penalty": "rollout/reward",
                    "held-out prompts": "eval/reward",
                    "held-out, greedy": "eval_greedy/reward",
                },
            ),
            Curve("Checker", "mean on prompts not used for training", {"held-out prompts": "eval/check"}),
            Curve("KL to the reference", "nats per response, estimated", {"rollouts": "rollout/kl"}),
            Curve(
                "Response length",
                "tokens",
                {"rollouts": "rollout/response_tokens", "held-out prompts": "eval/response_tokens"},
            ),
            Curve(
                "Turns",
                "taken by the model in a conversation",
                {"rollouts": "conversation/turns", "held-out prompts": "eval/turns"},
            ),
            Curve("Entropy", "nats per token", {"rollouts": "rollout/entropy", "training": "actor/entropy"}),
            Curve("Equal groups", "share of prompts with equal scores", {"rollouts": "rollout/equal_groups"}),
            Curve(
                "Ended responses",
                "share that ended before the length limit",
                {"rollouts": "rollout/ended_share", "held-out prompts": "eval/ended_share"},
            ),
            Curve(
                "Dynamic sampling",
                "prompts per rollout whose samples all score the same",
                {
                    "replaced": "dynamic_sampling/replaced",
                    "kept": "dynamic_sampling/kept_equal",
                    "drawn and dropped": "dynamic_sampling/dropped",
                },
            ),
            Curve("Policy loss", "does not measure progress", {"actor": "actor/policy_loss"}),
            Curve("Value loss", "error of the critic's values", {"critic": "critic/value_loss"}),
            Curve(
                "Clip fraction",
                "share of tokens whose update was clipped",
                {"actor": "actor/clip_fraction", "critic": "critic/clip_fraction"},
            ),
            *added_curves("step3_ppo"),
            Curve("Gradient norm", "before clipping", {"actor": "actor/grad_norm", "critic": "critic/grad_norm"}),
            SPEED,
            Curve(
                "Learning rate", "", {"actor": "actor/learning_rate", "critic": "critic/learning_rate"}, is_smooth=True
            ),
        ),
        evaluates=("reward", "check", "ended_share", "response_tokens", "turns", "reward/*", "check/*", "*/*", "*@*"),
        headlines=(
            Headline("Mean reward", "eval/reward", "reward_standard_error"),
            Headline("Checker", "eval/check", "checker_standard_error"),
        ),
        closing=(
            ClosingRow(
                "mean reward",
                before=("reward_sft", "reward_before"),
                after=("reward_ppo", "reward_after"),
                error=("reward_standard_error", "reward_standard_error"),
            ),
            ClosingRow(
                "the exact checker",
                before=("checker_sft", "checker_before"),
                after=("checker_ppo", "checker_after"),
                optional=True,
            ),
        ),
        samples=SampleWords(
            note="Responses to held-out prompts before and after step 3, with the same seed for each prompt.",
        ),
    ),
)
