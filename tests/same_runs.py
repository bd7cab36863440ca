"""Runs every program by its command line on tiny models, and tells whether two checkouts do the same, to the bit.

    python -m tests.same_runs record --checkout DIR --out before.json [--only NAME ...] [--place FOLDER]
    python -m tests.same_runs compare before.json after.json

For a change that must change nothing, such as moving files. `record` writes digests of all that the runs leave: the
tensors of every model, metrics, samples, reports, the rows of the cache, the figures that are printed. `compare` prints
a line a run, and what differs; its exit code is 1 where something does. Figures of a clock are left out, and wording:
of what is printed only the numbers count (a chat's answer and a preview's rows count whole).

It knows command lines and files alone, and imports nothing of the checkout: each rank of a run is forked from this
process, which has imported other people's packages once. Where a module may be moved, the checkout says itself where
it is (`_launcher`, `_cache_program`, `_recipe`).

Not covered: what needs a GPU (`--rollout_engine hybrid` under CUDA, FlexAttention, fp16) or a further package (vLLM,
Gradio, trackers), the chat at a terminal, several hosts, and whether a checkpoint or a cache of one checkout is taken
by the other.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.json_lines import write_lines
from tests.support.sorted_words import WORDS, conversations, pair_rows
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
LIMIT_SECONDS = 400.0


@dataclass(frozen=True)
class Run:
    """A command line. Its folder is out/NAME, its cache cache/NAME unless the flags name others.

    printed: what of standard output is digested: nothing, its numbers, or all of it. real: started as a user would,
    through the launcher, and not forked. copies: a run whose folder it begins with. kept: whether its files count.
    """

    name: str
    module: str
    flags: str
    ranks: int = 1
    real: bool = False
    stdin: str = ""
    printed: str = ""
    copies: str = ""
    code: int = 0
    kept: bool = True

    def needs(self) -> set[str]:
        """The runs whose folders it reads."""
        named = set(re.findall(r"out/(\w+)", self.flags)) | ({self.copies} if self.copies else set())
        return named - {self.name}


# The runs. Paths are relative to the temporary folder, so that they are the same in every record.

_SPLIT = "--data_split 2,2,2 --eval_fraction 0.2 --max_prompt_seq_len 64 --max_seq_len 100 --num_workers 1"
_PAIRS = f"--data_path jsonl:data/pairs.jsonl {_SPLIT}"
_STEPS = "--max_train_steps 3 --learning_rate 1e-3 --per_device_train_batch_size 2 --report_mfu false"
_ROLLOUTS = (
    "--max_train_steps 2 --per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--max_answer_seq_len 8 --actor_learning_rate 1e-3 --report_mfu false"
)
_CRITIC = "--critic_model_name_or_path start/scorer --critic_learning_rate 1e-3"
_FP32 = "--dtype fp32"
_SAMPLED = "--temperature 0.9 --top_p 0.95 --min_p 0.01 --stop q e --bad_words the apple"
_LARGER = "--data_split 1,0,0 --per_device_train_batch_size 12"
_ROWS = "--sequence_parallel_size 2"
_LETTERS = "--reward data/own.py:letters:2.0,length:0.5 --reward_length_characters 20 --num_samples_per_prompt 3"
_CHAT = "--data_path jsonl:data/chats.jsonl --prompt_style chat_template --data_split 1,1,1 --eval_fraction 0.2 \
    --max_prompt_seq_len 100 --max_seq_len 120 --num_workers 1"
_BLOCKS = f"--data_path jsonl:data/blocks.jsonl {_SPLIT} --parallel_thinking true"


def _one_model(step: str, name: str, flags: str, data: str = _PAIRS, model: str = "start/tiny", **more: Any) -> Run:
    return Run(name, f"training.{step}.main", f"--model_name_or_path {model} {data} {_STEPS} {flags}", **more)


_sft, _reward, _dpo = (partial(_one_model, step) for step in ("step1_sft", "step2_reward", "step2_dpo"))


def _ppo(name: str, flags: str, data: str = _PAIRS, model: str = "start/tiny", **more: Any) -> Run:
    flags = f"--actor_model_name_or_path {model} {data} {_ROLLOUTS} {flags}"
    return Run(name, "training.step3_ppo.main", flags, **more)


def _preview(name: str, flags: str) -> Run:
    return Run(f"preview_{name}", "preview", f"--tokenizer start/tiny --json --rows 0 {flags}", printed="all")


def _judge(name: str, flags: str, **more: Any) -> Run:
    return Run(
        name, "reward_evaluation", f"--model_name_or_path out/reward_fp32/model {flags}", printed="numbers", **more
    )


def _chat(name: str, flags: str, said: str = "Sort these words: pear fig.\n") -> Run:
    return Run(name, "chat", f"{flags} --max_new_tokens 12", stdin=said, printed="all")


def _evaluate(name: str, flags: str) -> Run:
    return Run(f"evaluate_{name}", "evaluate", flags, printed="numbers")


_DEEPSPEED_CHAT = """
    --data_path jsonl:data/pairs.jsonl --data_split 2,4,4 --actor_model_name_or_path start/tiny
    --critic_model_name_or_path start/scorer --num_padding_at_beginning 1 --per_device_generation_batch_size 2
    --per_device_training_batch_size 2 --generation_batches 1 --ppo_epochs 1 --max_prompt_seq_len 64
    --max_answer_seq_len 6 --actor_learning_rate 5e-3 --critic_learning_rate 5e-4 --actor_weight_decay 0.1
    --critic_weight_decay 0.1 --num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 2
    --num_warmup_steps 0 --deepspeed --seed 1234 --enable_hybrid_engine --inference_tp_size 1
    --tp_gather_partition_size 8 --actor_zero_stage 2 --critic_zero_stage 2 --actor_gradient_checkpointing
    --actor_dropout 0.0 --disable_critic_dropout --actor_lora_dim 4 --actor_lora_module_name layers.
    --actor_lora_learning_rate 5e-3 --only_optimize_lora --offload_reference_model --enable_ema --enable_tensorboard
    --tensorboard_path step3 --print_answers --print_answers_interval 1 --enable_test_mode --test_stop_step 2
    --dtype bf16 --align_overflow --report_mfu false --local_rank=0
"""

# The datasets whose classes come with the package, as `save_to_disk` leaves them: their splits and three rows.
_PAIR = {"prompt": "Human: Hi Assistant:", "chosen": " Hello", "rejected": " Go"}
_PASSAGES = {"positive_passages": [{"text": "high"}], "negative_passages": [{"text": "low"}]}
_ANSWERS = {"zh_cn": [{"text": "four"}], "ja": [{"text": "five"}]}
HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "Dahoas/rm-static": ("train test", _PAIR),
    "Dahoas/full-hh-rlhf": ("train test", _PAIR),
    "Dahoas/synthetic-instruct-gptj-pairwise": ("train", {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"}),
    "yitingxie/rlhf-reward-datasets": (
        "train test",
        {"prompt": "Human: Hi ", "chosen": "Assistant: Hello", "rejected": "Assistant: Go"},
    ),
    "openai/webgpt_comparisons": (
        "train",
        {"question": {"full_text": "Why?"}, "answer_0": "So [1].", "answer_1": "No.", "score_0": -0.5, "score_1": 0.5},
    ),
    "stanfordnlp/SHP": (
        "train validation",
        {"history": "Why?", "human_ref_A": "a", "human_ref_B": "b", "labels": 0},
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": ("train test", {"prompt": "USER: Hi ASSISTANT:", "label": "Hello"}),
    "wangrui6/Zhihu-KOL": ("train", {"INSTRUCTION": "Why?", "RESPONSE": "So."}),
    "Cohere/miracl-zh-queries-22-12": ("train dev", {"query": "Hill?", **_PASSAGES}),
    "Cohere/miracl-ja-queries-22-12": ("train dev", {"query": "Hill?", **_PASSAGES}),
    "Hello-SimpleAI/HC3-Chinese": ("train", {"question": "What?", "human_answers": ["this", "that"]}),
    "mkqa-Chinese": ("train", {"queries": {"zh_cn": "How many?", "ja": "Many?"}, "answers": _ANSWERS}),
    "mkqa-Japanese": ("train", {"queries": {"zh_cn": "How many?", "ja": "Many?"}, "answers": _ANSWERS}),
    "lmqg/qg_jaquad": ("train validation", {"question": "What?", "sentence": "It is this."}),
    "lmqg/qag_jaquad": ("train validation", {"questions": ["What?", "Who?"], "paragraph": "It is this."}),
}
_HUB = " ".join(f"data/hub/{name}" for name in HUB)

RUNS = (
    *(
        Run(
            name,
            "new_model",
            f"--hidden_size 32 --num_attention_heads 2 --intermediate_size 64 --out out/{name} {flags}",
        )
        for name, flags in (
            ("new_model", "--data_path embedded --vocab_size 300 --num_hidden_layers 2 --seed 3"),
            (
                "new_model_csv",
                "--data_path csv:data/pairs.csv --vocab_size 290 --num_hidden_layers 1 --pad_is_eos true",
            ),
        )
    ),
    # step 1
    _sft("sft_fp32", f"{_FP32} --eval_interval 1 --gradient_accumulation_steps 2 --weight_decay 0.1"),
    _sft("sft_bf16_zero2", "--zero_stage 2 --gradient_accumulation_steps 2", ranks=2),
    _sft("sft_zero3", f"{_FP32} --zero_stage 3 --max_tokens_per_micro_batch 150", ranks=2),
    _sft("sft_launched", f"{_FP32} --zero_stage 1", ranks=2, real=True),
    _sft("sft_offload", "--zero_stage 2 --offload true --dropout 0.1 --truncation left --max_seq_len 24"),
    _sft(
        "sft_lora",
        f"{_FP32} --lora_dim 4 --lora_alpha 8 --lora_dropout 0.1 --lora_learning_rate 2e-3 --save_at_end true",
    ),
    _sft("sft_padded", f"{_FP32} --padded"),
    _sft(
        "sft_noise",
        f"{_FP32} --neftune_alpha 5 --z_loss_coef 1e-2 --num_warmup_steps 1 --lr_scheduler_type linear "
        "--max_grad_norm 0.5 --loss_on conversation",
    ),
    _sft("sft_recomputed", f"{_FP32} --gradient_checkpointing true --dropout 0.1"),
    _sft("sft_chat", f"{_FP32} --train_turns all", data=_CHAT, model="start/chat"),
    _sft(
        "sft_messages",
        f"{_FP32} --chat_template data/llama3.jinja --train_turns last --bad_conversations drop",
        data=_CHAT.replace("chats.jsonl", "messages.jsonl").replace("1,1,1", "1,0,0"),
        model="start/chat",
    ),
    _sft("sft_parallel", _FP32, data=_BLOCKS),
    _sft("sft_parallel_zero3", f"{_FP32} --zero_stage 3", data=_BLOCKS, ranks=2),
    _sft(
        "sft_mixed",
        "--sft_only_data_path jsonl:data/texts.jsonl csv:data/pairs.csv --max_train_rows 20 --dtype "
        "fp32 --add_end_of_conversation_token true --end_of_conversation_token <end>",
    ),
    _sft("sft_embedded", _FP32, "--data_path embedded --max_train_rows 40 --max_eval_rows 10", "out/new_model"),
    _sft("sft_configured", "--deepspeed_config data/deepspeed.json --zero_stage 1"),
    _sft("sft_opt", f"{_FP32} --dropout 0.1", model="start/opt"),
    _sft(
        "sft_gsm8k",
        f"{_FP32} --dataset_module CHECKOUT/examples/gsm8k.py --seed 7",
        data=_PAIRS.replace("jsonl:data/pairs.jsonl", "data/gsm8k"),
    ),
    _sft("sft_saved", f"{_FP32} --dropout 0.1 --save_every 1 --keep_last 0"),
    _sft(
        "sft_resumed",
        f"{_FP32} --dropout 0.1 --save_every 1 --keep_last 0 --resume out/sft_resumed/checkpoints/step_000001",
        copies="sft_saved",
    ),
    _sft("sft_head", f"{_FP32} --mtp_num_layers 2 --gradient_accumulation_steps 2 --eval_interval 1 --dropout 0.1"),
    _sft("sft_head_zero3", "--mtp_num_layers 1 --zero_stage 3 --save_at_end true", ranks=2),
    _sft(
        "sft_mixture",
        f"{_FP32} --mtp_num_layers 1 --mtp_detach false --gradient_accumulation_steps 2 --neftune_alpha 5 "
        "--dropout 0.1",
        model="start/mixture",
    ),
    _sft("sft_mixture_zero2", f"{_FP32} --zero_stage 2 --router_aux_loss_coef 0.1", model="start/mixture", ranks=2),
    _sft("sft_products", f"{_FP32} --cpu_products onednn {_LARGER} --save_every 1 --keep_last 0"),
    _sft(
        "sft_products_resumed",
        f"{_FP32} {_LARGER} --save_every 1 --keep_last 0 --resume out/sft_products_resumed/checkpoints/step_000001",
        copies="sft_products",
    ),
    _sft("sft_saved_zero3", "--zero_stage 3 --save_every 2", ranks=2),
    _sft("sft_resumed_zero3", "--zero_stage 3 --save_every 2 --resume", ranks=2, copies="sft_saved_zero3"),
    _sft("sft_rows", f"{_FP32} {_ROWS} --zero_stage 3 --share_beginnings 2 --dropout 0.1 --save_every 2", ranks=2),
    _sft(
        "sft_rows_resumed",
        f"{_FP32} --per_device_train_batch_size 1 --zero_stage 3 --share_beginnings 2 --dropout 0.1 --save_every 2 "
        "--resume",
        ranks=2,
        copies="sft_rows",
    ),
    _sft(
        "sft_rows_mixture",
        f"{_FP32} {_ROWS} --mtp_num_layers 2 --router_aux_loss_coef 0.1 --neftune_alpha 5 --zero_stage 2",
        model="start/mixture",
        ranks=2,
    ),
    # step 2
    _reward("reward_rows", f"{_ROWS} --zero_stage 2 --padded true --gradient_checkpointing true", ranks=2),
    _reward("reward_fp32", f"{_FP32} --eval_interval 2 --normalization_rows 8"),
    _reward("reward_zero2", "--zero_stage 2 --gradient_checkpointing true", ranks=2),
    _reward("reward_zero3_lora", "--zero_stage 3 --lora_dim 4 --save_at_end true", ranks=2),
    _reward(
        "reward_options",
        f"{_FP32} --margin_column margin --margin_scale 0.5 --label_smoothing 0.1 --center_coef 0.01 "
        "--gradient_accumulation_steps 2",
    ),
    _reward("reward_ranked", _FP32, f"--data_path parquet:data/ranked.parquet --responses_column answers {_SPLIT}"),
    _reward("new_scorer", _FP32, "--data_path embedded --max_train_rows 40 --max_eval_rows 10", "out/new_model"),
    _reward("reward_parallel", f"{_FP32} --padded true", data=_BLOCKS, model="out/sft_parallel/model"),
    _reward("reward_chat", _FP32, data=_CHAT, model="out/sft_chat/model"),
    _reward("reward_saved", f"{_FP32} --save_every 2 --dropout 0.1"),
    _reward("reward_resumed", f"{_FP32} --save_every 2 --dropout 0.1 --resume", copies="reward_saved"),
    # DPO
    _dpo("dpo_fp32", f"{_FP32} --eval_interval 1 --beta 0.2"),
    _dpo("dpo_rows", f"{_FP32} {_ROWS} --zero_stage 1", ranks=2),
    _dpo("dpo_zero3", f"{_FP32} --zero_stage 3 --label_smoothing 0.1 --sft_coef 0.5", ranks=2),
    _dpo("dpo_adapter_off", f"{_FP32} --reference adapter_off --lora_dim 4 --learning_rate 1e-2"),
    _dpo("dpo_mixture", f"{_FP32} --max_tokens_per_micro_batch 150", model="start/mixture"),
    _reward("reward_mixture", f"{_FP32} --max_tokens_per_micro_batch 150", model="start/mixture"),
    _dpo(
        "dpo_sum",
        f"{_FP32} --loss_type sigmoid,sigmoid_norm:0.5,robust:0.5,apo_zero:0.2,apo_down:0.2,plackett_luce:0.3,sft:0.1 "
        "--label_smoothing 0.1",
    ),
    _dpo("dpo_simpo", f"{_FP32} --loss_type simpo,orpo:0.5,cpo:0.5 --simpo_gamma 0.3 --cpo_alpha 0.5 --beta 2"),
    _dpo("dpo_ipo", f"{_FP32} --loss_type ipo", f"--data_path csv:data/pairs.csv {_SPLIT}"),
    _dpo(
        "dpo_hinge",
        "--loss_type hinge --padded true",
        f"--data_path parquet:data/ranked.parquet --responses_column answers {_SPLIT}",
    ),
    _dpo("dpo_saved", f"{_FP32} --save_every 2"),
    _dpo("dpo_resumed", f"{_FP32} --save_every 2 --resume", copies="dpo_saved"),
    # step 3
    _ppo(
        "ppo_fp32",
        f"{_FP32} {_CRITIC} --eval_interval 1 --val_greedy true --ppo_epochs 2 --checker exact_match "
        "--per_device_training_batch_size 2 --show_samples 2",
    ),
    _ppo(
        "ppo_options",
        f"{_FP32} --critic_model_name_or_path out/reward_fp32/model --critic_learning_rate 1e-3 --enable_ema "
        "--ema_decay 0.5 --kl_control adaptive "
        "--kl_target 0.1 --kl_horizon 100 --unsupervised_dataset_name jsonl:data/texts.jsonl "
        "--missing_eos_penalty 0.5 --overlong_buffer_tokens 2 --actor_dropout 0.1 --normalize_reward_scores true",
        model="out/sft_fp32/model",
    ),
    _ppo("ppo_zero2", f"{_CRITIC} --actor_zero_stage 2 --critic_zero_stage 2 --enable_ema", ranks=2),
    _ppo(
        "ppo_zero3",
        f"{_CRITIC} --actor_zero_stage 3 --critic_zero_stage 3 --actor_lora_dim 4 --critic_lora_dim 2 --save_at_end "
        "--offload_reference_model true",
        ranks=2,
    ),
    _ppo(
        "ppo_trunk",
        f"--share_trunk --actor_lora_dim 4 --critic_lora_dim 2 --reward length --reward_length_characters 20 {_FP32} "
        "--critic_learning_rate 1e-2 --save_at_end --critic_warmup 1 --enable_ema --ema_decay 0.5",
    ),
    _ppo("ppo_reused", f"{_FP32} {_CRITIC} --reuse_forwards true --reuse_values true"),
    _ppo("ppo_dumped", f"{_FP32} {_CRITIC} {_SAMPLED} --rollout_dump out/ppo_dumped/rollouts"),
    _ppo("ppo_replayed", f"{_FP32} {_CRITIC} {_SAMPLED} --rollout_replay out/ppo_dumped/rollouts"),
    _ppo("ppo_hybrid", f"{_FP32} {_CRITIC} --rollout_engine hybrid --top_k 20"),
    _ppo("ppo_stopped", f"{_FP32} {_CRITIC} --actor_dropout 0.1 --enable_ema --stop_before 1s", kept=False),
    _ppo("ppo_went_on", f"{_FP32} {_CRITIC} --actor_dropout 0.1 --enable_ema --resume", copies="ppo_stopped"),
    _ppo("ppo_head", f"{_FP32} {_CRITIC} --mtp_num_layers 1 --speculate 2 --actor_dropout 0.1"),
    _ppo("ppo_ngrams", f"{_FP32} {_CRITIC} --speculate auto --save_every 1"),
    _ppo("ppo_head_zero3", f"{_CRITIC} --mtp_num_layers 1 --actor_zero_stage 3 --save_every 1", ranks=2),
    _ppo(
        "ppo_mixture",
        f"{_FP32} --critic_model_name_or_path start/mixture_scorer --critic_learning_rate 1e-3 --router_aux_loss_coef "
        "0.1 --unsupervised_dataset_name jsonl:data/texts.jsonl --max_tokens_per_micro_batch 100 --mtp_num_layers 1 "
        "--actor_dropout 0.1",
        model="start/mixture",
    ),
    _ppo("ppo_experts", f"{_FP32} {_LETTERS} --advantage grpo --replay_routers follow", model="start/mixture"),
    _ppo(
        "ppo_turns",
        f"{_FP32} --advantage grpo --num_samples_per_prompt 2 --environment data/own.py:Counts --reward environment "
        "--stop e i --max_answer_seq_len 40",
        data=_CHAT,
        model="start/chat",
    ),
    _ppo("ppo_saved", f"{_CRITIC} --actor_zero_stage 2 --save_every 1", ranks=2),
    _ppo("ppo_resumed", f"{_CRITIC} --actor_zero_stage 2 --save_every 1 --resume", ranks=2, copies="ppo_saved"),
    _ppo("ppo_rows", f"{_FP32} {_CRITIC} {_ROWS} --actor_zero_stage 3 --critic_zero_stage 2", ranks=2),
    _ppo(
        "grpo_rows",
        f"{_FP32} {_LETTERS} {_ROWS} --advantage grpo --replay_routers follow --router_aux_loss_coef 0.1 "
        "--mtp_num_layers 1",
        model="start/mixture",
        ranks=2,
    ),
    _ppo("ppo_val_only", f"{_FP32} {_CRITIC} --val_only true --checker regex --reward_regex fig"),
    _ppo(
        "ppo_chat",
        f"{_FP32} --critic_model_name_or_path start/chat_scorer --return_columns raw_prompt raw_prompt_ids "
        "full_prompts --reward data/own.py:leveled --prompt_sampler CHECKOUT/examples/curriculum.py:WorstAgain",
        data=_CHAT,
        model="start/chat",
    ),
    _ppo(
        "grpo",
        f"{_FP32} {_LETTERS} --advantage grpo --kl_in loss --kl_coef 0.04 --loss_aggregation seq-mean-token-mean "
        "--dynamic_sampling_tries 1 --mask_truncated_responses true",
    ),
    _ppo("grpo_two_ranks", f"{_FP32} {_LETTERS} --advantage grpo --actor_zero_stage 2", ranks=2),
    _ppo("grpo_passk", f"{_FP32} {_LETTERS} --advantage grpo_passk --policy_loss cispo --kl_coef 0"),
    _ppo("gspo", f"{_FP32} {_LETTERS} --advantage grpo --policy_loss gspo --norm_adv_by_std false --entropy_coef 0.01"),
    _ppo("rloo", f"{_FP32} {_LETTERS} --advantage rloo --kl_estimator full --loss_aggregation seq-mean-token-sum"),
    _ppo("reinforce", f"{_FP32} {_LETTERS} --advantage reinforce++ --mismatch_correction truncate --gamma 0.9"),
    _ppo(
        "reinforce_baseline",
        f"{_FP32} {_LETTERS} --advantage reinforce++_baseline --policy_loss kl_cov --cov_share 0.1 --ppo_epochs 2",
    ),
    _ppo("remax", f"{_FP32} {_LETTERS} --advantage remax --clip_range_high 0.28 --dual_clip 3 --padded true"),
    _ppo("opo", f"{_FP32} {_LETTERS} --advantage opo --policy_loss clip_cov --cov_share 0.1 --kl_estimator k2"),
    _ppo("gpg", f"{_FP32} {_LETTERS} --advantage gpg --policy_loss gpg --loss_aggregation seq-mean-token-sum-norm"),
    _ppo("baseline", f"{_FP32} {_LETTERS} --advantage optimal_token_baseline --policy_loss sapo --sapo_tau_neg 2"),
    _ppo(
        "geo_mean",
        f"{_FP32} {_LETTERS} --advantage tir_optimal_token_baseline --otb_zero_tail false --policy_loss geo_mean "
        "--mismatch_rejection seq_max_k3:0.01 --mismatch_rejected leave --mismatch_correction truncate "
        "--mismatch_normalize true --ppo_epochs 2",
    ),
    _ppo(
        "bypass",
        f"{_FP32} {_LETTERS} --advantage rloo --norm_adv_over batch --mismatch_recipe bypass_pg_geo_rs_token_tis "
        "--policy_loss gpg --ppo_epochs 2 --mismatch_veto 1e-4",
    ),
    _ppo(
        "grpo_gsm8k",
        f"{_FP32} --advantage grpo --num_samples_per_prompt 2 --reward gsm8k:1,format:0.5,data/own.py:letters "
        "--dataset_module CHECKOUT/examples/gsm8k.py --prompt_dataset "
        "CHECKOUT/examples/curriculum.py:SureQuestions --stop_update_kl 0.5 --stop_kl 1000 --max_train_steps 4",
        data=_PAIRS.replace("jsonl:data/pairs.jsonl", "data/gsm8k"),
    ),
    _ppo(
        "ppo_embedded",
        f"{_FP32} --critic_model_name_or_path out/new_scorer/model --reward embedded:1,model:0.1 --lam 0.9 "
        "--mismatch_correction mask --mismatch_level sequence --max_train_rows 40 --max_eval_rows 8",
        data="--data_path embedded",
        model="out/new_model",
    ),
    Run("deepspeed_chat", "training.step3_ppo.main", " ".join(_DEEPSPEED_CHAT.split())),
    # several steps
    Run("all_steps", "all_steps", "--config data/all_steps.yaml --output_dir out/all_steps"),
    # finished models
    _evaluate(
        "win_rate",
        f"win_rate --model_name_or_path out/ppo_fp32/model --baseline start/tiny --reward_model out/reward_fp32/model "
        f"{_PAIRS} --max_answer_seq_len 8",
    ),
    _evaluate(
        "reward",
        f"reward --model_name_or_path out/sft_fp32/model --reward data/own.py:letters:2.0,length:1 {_PAIRS} "
        "--reward_length_characters 20 --max_answer_seq_len 8 --split train --top_p 0.9",
    ),
    _evaluate(
        "gsm8k",
        "gsm8k --model_name_or_path start/tiny --temperature 0 --dataset_module CHECKOUT/examples/gsm8k.py "
        f"--data_path data/gsm8k {_SPLIT} --max_answer_seq_len 8",
    ),
    _evaluate("perplexity", f"perplexity --model_name_or_path out/sft_fp32/model {_PAIRS}"),
    _evaluate(
        "text",
        "perplexity --model_name_or_path out/sft_fp32/model --unsupervised_dataset_name jsonl:data/texts.jsonl "
        "--max_seq_len 40",
    ),
    _judge("judge", _PAIRS),
    _judge("judge_file", "--score_file data/whole_pairs.jsonl --max_seq_len 100 --output out/judge_file/scores.jsonl"),
    _judge("judge_zero3", f"{_PAIRS} --zero_stage 3", ranks=2),
    _chat("chat", "out/sft_fp32/model --temperature 0"),
    _chat("chat_two", "out/sft_fp32/model out/ppo_fp32/model --reward_model out/reward_fp32/model --top_k 50"),
    _chat("chat_template", "out/sft_chat/model --temperature 0 --system Short.", "Hello there\n"),
    Run("export", "export", "out/sft_saved out/export"),
    Run("export_lora", "export", "out/sft_lora/checkpoints/step_000003 out/export_lora --keep_lora"),
    Run("export_zero3", "export", "out/sft_saved_zero3 out/export_zero3"),
    Run("export_reward", "export", "out/reward_zero3_lora out/export_reward"),
    Run("export_actor", "export", "out/ppo_zero3 out/export_actor"),
    Run("export_critic", "export", "out/ppo_trunk out/export_critic --part critic"),
    Run("export_average", "export", "out/ppo_trunk out/export_average --part average"),
    Run("report", "report", "out/sft_fp32 out/dpo_fp32 out/ppo_fp32 --out out/report/page.html"),
    # the data
    _preview("pairs", f"--phase 2 {_PAIRS} --margin_column margin"),
    _preview("prompts", f"--phase 3 {_PAIRS} --split eval --return_columns full_prompts --prompt_truncation left"),
    _preview(
        "texts",
        f"--phase unsupervised --unsupervised_dataset_name jsonl:data/texts.jsonl {_PAIRS} --max_answer_seq_len 8",
    ),
    _preview("blocks", f"--phase 1 {_BLOCKS}"),
    _preview("ranked", f"--phase 2 --data_path parquet:data/ranked.parquet --responses_column answers {_SPLIT}"),
    _preview("alpaca", f"--phase 1 --data_path json:data/alpaca.json {_SPLIT}"),
    _preview("sharegpt", f"--phase 1 --data_path arrow:data/sharegpt.arrow {_SPLIT}"),
    _preview("folder", f"--phase 2 --data_path csv:data/folder {_SPLIT} --truncation middle --max_seq_len 16"),
    _preview(
        "several",
        f"--phase 1 --data_path jsonl:data/pairs.jsonl csv:data/pairs.csv embedded {_SPLIT} \
        --max_train_rows 60 --max_eval_rows 20",
    ),
    _preview("chat", f"--phase 1 {_CHAT} --tokenizer start/chat"),
    _preview("hub", f"--phase 1 --data_path {_HUB} {_SPLIT} --data_split 1,1,0"),
    _preview("hub_pairs", f"--phase 2 --data_path {_HUB} {_SPLIT} --data_split 0,1,0"),
    _preview("local", f"--phase 2 --data_path data/local/jsonfile {_SPLIT}"),
    Run(
        "preview_shown", "preview", f"--tokenizer start/tiny --phase 1 {_BLOCKS} --show_layout true", printed="numbers"
    ),
    Run("cache_list", "CACHE", "list --data_output_path cache/sft_fp32", printed="numbers"),
    Run("cache_verify", "CACHE", "verify --data_output_path cache/sft_fp32", printed="numbers"),
    # plans: of every recipe, on a model of 100 million weights that has none
    *(
        Run(
            f"dry_{step}_{recipe}".replace(".", "_"),
            f"training.{step}.main",
            f"--config RECIPE:{step}:{recipe} --dry_run true --num_ranks 8 {models}",
            printed="numbers",
        )
        for step, models in (
            *((step, "--model_name_or_path start/large") for step in ("step1_sft", "step2_reward", "step2_dpo")),
            ("step3_ppo", "--actor_model_name_or_path start/large --critic_model_name_or_path start/large"),
        )
        for recipe in ("gemma_7b_lora", "llama2_13b", "llama3.1_70b", "opt_1.3b", "opt_125m", "qwen2.5_7b")
    ),
    _ppo(
        "dry_grpo",
        f"{_FP32} --advantage grpo --reward length --reward_length_characters 5 --num_samples_per_prompt 4 --dry_run "
        "true --reuse_forwards true --per_device_training_batch_size 16",
        model="start/large",
        printed="numbers",
    ),
    # mistakes
    _sft("wrong_flag", "--learning_rat 1", code=2),
    _sft("wrong_data", "--prompt_column nowhere", code=2),
)


# What they start from.


def make_files(place: Path) -> None:
    """Rows in files of every kind, tiny models of random weights, and a file of the user's own functions."""
    (place / "data").mkdir()
    sys.stderr = open(os.devnull, "w")  # bars of progress
    for make in (_make_pairs, _make_chats, _make_other_rows, _make_own_files, _make_models):
        make(place)


def _make_pairs(place: Path) -> None:
    rows: list[dict[str, Any]] = [
        {**row, "ground_truth": row["chosen"].strip(), "data_source": ("short", "long")[number % 2], "n": number}
        for number, row in enumerate(pair_rows(60))
    ]
    rows[7]["rejected"] = None
    write_lines(place / "data/pairs.jsonl", rows)
    write_lines(place / "data/whole_pairs.jsonl", rows[:7] + rows[8:])
    (place / "data/folder").mkdir()
    lines = [f"What is {a} + {b}?,{a} + {b} is {a + b}.,{a} + {b} is {a + b + 1}.\n" for a in range(6) for b in "456"
             for b in [int(b)]]  # fmt: skip
    header = "question,answer,rejected\n"
    (place / "data/pairs.csv").write_text(header + "".join(lines))
    (place / "data/folder/train-0.csv").write_text(header + "".join(lines[:12]))
    (place / "data/folder/test-0.csv").write_text(header + "".join(lines[12:]))


def _make_chats(place: Path) -> None:
    rows = conversations()
    whole = (
        {"messages": [*row["prompt"], *row["chosen"]] if n % 10 else row["prompt"][:1]} for n, row in enumerate(rows)
    )
    write_lines(place / "data/chats.jsonl", rows)
    write_lines(place / "data/messages.jsonl", whole)


def _make_other_rows(place: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    dice = random.Random(1)
    data = place / "data"
    write_lines(data / "texts.jsonl", [{"text": sentence * 3} for sentence in SENTENCES])
    ranked = []
    for number in range(40):
        answers = [" " + " ".join(dice.choices(WORDS, k=dice.randint(1, 5))) for _ in range(2 + number % 3)]
        ranked.append({"prompt": f"Human: Name fruit {number}. Assistant:", "answers": answers})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ranked), data / "ranked.parquet")
    turns = [
        [{"from": "human", "value": f"Sort {number}"}, {"from": "gpt", "value": "fig"}, {"from": "human", "value": "b"},
         {"from": "gpt", "value": "apple"}][: 2 + 2 * (number % 2)]
        for number in range(24)
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist([{"conversations": said} for said in turns])
    with pyarrow.OSFile(str(data / "sharegpt.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as sink:
        sink.write_table(table)
    instructions = [
        {"instruction": f"Add one to {number}.", "input": "x" * (number % 2), "output": str(number + 1)}
        for number in range(20)
    ]
    (data / "alpaca.json").write_text(json.dumps(instructions))
    blocks = []
    for number in range(40):
        paths = "".join(f"<Path>{' fig' * (1 + (number + path) % 4)}</Path>" for path in range(2 + number % 2))
        chosen = f" pear <Parallel>{paths}</Parallel> apple" * (1 + number % 5 // 4)
        blocks.append({"prompt": f"Human: Sort {number}. Assistant:", "chosen": chosen, "rejected": " fig fig pear"})
    write_lines(data / "blocks.jsonl", blocks)
    (data / "gsm8k").mkdir()
    solved = [{"question": f"{n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]
    write_lines(data / "gsm8k/train.jsonl", solved[:25])
    write_lines(data / "gsm8k/test.jsonl", solved[25:])
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    guesses = [
        {"question": row["question"], "ground_truth": row["answer"],
         **{model: {"is_correct": model[0] == "1", "solution": f"Perhaps {n}.\nA: {n}"} for model in models}}
        for n, row in enumerate(solved[25:])
    ]  # fmt: skip
    write_lines(data / "gsm8k/model_solutions.jsonl", guesses)
    (data / "local/jsonfile/data").mkdir(parents=True)
    for name, count in (("train", 20), ("eval", 5)):
        pairs = [{"prompt": f"Human: {n} Assistant:", "chosen": f"{n}", "rejected": "no"} for n in range(count)]
        (data / f"local/jsonfile/data/{name}.json").write_text(json.dumps(pairs))
    _make_hub(data / "hub")


def _make_hub(place: Path) -> None:
    """Strings end with the number of their row, so that no two rows are the same."""
    from datasets import Dataset, DatasetDict

    def numbered(value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {name: numbered(inner, number) for name, inner in value.items()}
        if isinstance(value, list):
            return [numbered(inner, number) for inner in value]
        return f"{value} {number}" if isinstance(value, str) and not value.endswith(":") else value

    for name, (splits, row) in HUB.items():
        rows = {split: Dataset.from_list([numbered(row, n) for n in range(3 + len(split))]) for split in splits.split()}
        DatasetDict(rows).save_to_disk(place / name)


OWN = """
def letters(prompts, responses, *, ground_truth, data_source, **columns):
    counts = [float(sum(letter.isalpha() for letter in response)) for response in responses]
    return [count / 10 for count in counts], {"count": counts}

def leveled(prompts, responses, *, ground_truth, level, raw_prompt, raw_prompt_ids, full_prompts, **columns):
    lengths = [float(len(ids)) for ids in raw_prompt_ids]
    return [own / 10 + len(text) for own, text in zip(level, responses)], {"length": lengths}

class Counts:
    turns = 0

    def reset(self, row):
        return row["messages"], None

    def step(self, message):
        self.turns += 1
        return [{"role": "user", "content": "more"}], sum(map(ord, message.text)) % 7 / 3, self.turns == 2

    def close(self):
        pass
"""
ALL_STEPS = """
output_dir: nowhere
ranks: 1
seed: 5
new_model: {vocab_size: 300, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64}
shared:
  data_path: [embedded]
  data_output_path: cache/all_steps
  data_split: 1,1,1
  max_train_rows: 32
  max_eval_rows: 8
  max_prompt_seq_len: 32
  max_seq_len: 64
  num_workers: 1
  dtype: fp32
  report_mfu: false
step1_sft: {max_train_steps: 2, per_device_train_batch_size: 8, learning_rate: 1.0e-3}
step2_reward: {max_train_steps: 2, per_device_train_batch_size: 8, learning_rate: 1.0e-3}
step3_ppo:
  max_train_steps: 2
  max_answer_seq_len: 8
  per_device_generation_batch_size: 4
  per_device_training_batch_size: 4
  checker: embedded
"""


def _make_own_files(place: Path) -> None:
    (place / "data/own.py").write_text(OWN)
    (place / "data/llama3.jinja").write_text(chat_template("llama3"))
    (place / "data/all_steps.yaml").write_text(ALL_STEPS)
    own = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "bf16": {"enabled": True}}
    (place / "data/deepspeed.json").write_text(json.dumps(own))


def _make_models(place: Path) -> None:
    """start/: a Llama, a reward model of its shape, mixtures of experts of both kinds, an OPT, a larger Llama without
    weights, and the first two with a chat template."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        MixtralConfig,
        MixtralForCausalLM,
        MixtralForSequenceClassification,
        OPTConfig,
        OPTForCausalLM,
    )

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 160, "initializer_range": 0.1, "tie_word_embeddings": True}  # fmt: skip
    tokenizers = {"": train_tokenizer(SENTENCES), "chat": chat_tokenizer(chat_template("chatml"))}
    for prefix, tokenizer in tokenizers.items():
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = LlamaConfig(vocab_size=384, **shape, **ids)
        torch.manual_seed(0)
        models: dict[str, Any] = {prefix or "tiny": LlamaForCausalLM(config)}
        torch.manual_seed(1)
        config = LlamaConfig(vocab_size=384, num_labels=1, **shape, **ids)
        models[f"{prefix}_scorer".strip("_")] = LlamaForSequenceClassification(config)
        if not prefix:
            torch.manual_seed(2)
            models["opt"] = OPTForCausalLM(
                OPTConfig(vocab_size=384, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
                          num_attention_heads=2, max_position_embeddings=160, **ids)
            )  # fmt: skip
            experts = {**shape, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
            torch.manual_seed(3)
            models["mixture"] = MixtralForCausalLM(MixtralConfig(vocab_size=384, **experts, **ids))
            torch.manual_seed(4)
            models["mixture_scorer"] = MixtralForSequenceClassification(
                MixtralConfig(vocab_size=384, num_labels=1, router_aux_loss_coef=0.05, **experts, **ids)
            )
            large = LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                                num_attention_heads=12, architectures=["LlamaForCausalLM"], **ids)  # fmt: skip
            large.save_pretrained(place / "start/large")
            tokenizer.save_pretrained(place / "start/large")
        for name, model in models.items():
            model.save_pretrained(place / "start" / name)
            tokenizer.save_pretrained(place / "start" / name)


# Running them.


def import_packages() -> None:
    """Other people's packages, so that a fork has them. None of them works here: a process that forks must not have
    started their threads."""
    for name in ("torch", "torch.utils.tensorboard", "transformers", "transformers.models.llama.modeling_llama",
                 "transformers.models.opt.modeling_opt", "datasets", "peft", "deepspeed", "pyarrow.parquet",
                 "safetensors.torch"):  # fmt: skip
        importlib.import_module(name)


def in_fork(work: Callable[[], int]) -> int:
    """The process that does `work` and ends with what it returns."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - a fork never returns into its parent's code
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def wait_for(processes: Sequence[int], limit: float = LIMIT_SECONDS) -> int:
    """The largest exit code; the processes are ended where one fails or the time is over."""
    deadline = time.monotonic() + limit
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = abs(os.waitstatus_to_exitcode(status))
                    if codes[process]:
                        deadline = min(deadline, time.monotonic() + 15)
        if time.monotonic() > deadline:
            for process in processes:
                if process not in codes:
                    os.kill(process, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return max(codes.values())


@dataclass(frozen=True)
class Recorder:
    """Runs of one checkout in one folder."""

    checkout: Path
    place: Path

    def run(self, run: Run) -> dict[str, Any]:
        if run.copies:
            shutil.copytree(self.place / "out" / run.copies, self.place / "out" / run.name, symlinks=True)
        (self.place / "said").mkdir(exist_ok=True)
        said = {stream: self.place / "said" / f"{run.name}.{stream}" for stream in ("stdin", "stdout", "stderr")}
        said["stdin"].write_text(run.stdin)
        started = time.monotonic()
        code = self._started(run, said)
        told: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - started, 1)}
        if code != run.code:
            told["failed"] = [said[stream].read_text(errors="replace")[-3000:] for stream in ("stdout", "stderr")]
        elif run.kept:
            told |= self._digested(run, said)
        return told

    def _started(self, run: Run, said: dict[str, Path]) -> int:
        module, flags = self._command(run)
        if run.real:
            environment = self._environment() | {"THREESTEP_RANKS": str(run.ranks)}
            command = [sys.executable, "-m", _launcher(self.checkout), module, *flags]
            with open(said["stdin"]) as asked, open(said["stdout"], "w") as out, open(said["stderr"], "w") as err:
                return subprocess.run(
                    command, stdin=asked, stdout=out, stderr=err, cwd=self.place, env=environment, timeout=LIMIT_SECONDS
                ).returncode
        port = _free_port()
        ranks = [
            in_fork(lambda rank=rank: self._rank(module, flags, said, rank, run.ranks, port))
            for rank in range(run.ranks)
        ]
        return wait_for(ranks)

    def _command(self, run: Run) -> tuple[str, list[str]]:
        flags = shlex.split(run.flags.replace("CHECKOUT", str(self.checkout)))
        flags = [_recipe(self.checkout, flag) if flag.startswith("RECIPE:") else flag for flag in flags]
        module = _cache_program(self.checkout) if run.module == "CACHE" else run.module
        own = {"--output_dir": f"out/{run.name}", "--data_output_path": f"cache/{run.name}"}
        plain = ("chat", "export", "report", "all_steps", "new_model")
        if module in plain or run.module == "CACHE":
            own = {}
        elif module == "preview" or "--score_file" in flags:
            del own["--output_dir"]
        if "--output" in flags or "--out" in flags:
            (self.place / "out" / run.name).mkdir(parents=True, exist_ok=True)
        for flag, value in own.items():
            if flag not in flags:
                flags += [flag, value]
        return module if "." in module else _program_named(self.checkout, module), flags

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("THREESTEP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"))
        }
        own = {"PYTHONPATH": str(self.checkout), "HOME": str(self.place), "HF_HOME": str(self.place / "hub")}
        return {**inherited, **ENVIRONMENT, **own}

    def _rank(self, module: str, flags: list[str], said: dict[str, Path], rank: int, ranks: int, port: int) -> int:
        """One rank, in a process of its own: as `python -m module flags` in the temporary folder."""
        for handle, stream, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
            make = 0 if handle == 0 else os.O_CREAT | os.O_APPEND
            os.dup2(os.open(said[stream], mode | make, 0o644), handle)
        sys.stdin = open(0, closefd=False)
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # otherwise a semaphore that all forks share
        os.chdir(self.place)
        os.environ.clear()
        os.environ.update(self._environment())
        if ranks > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[0:1] = [str(self.place), str(self.checkout)]
        sys.argv = [module, *flags]
        found = importlib.import_module(module.split(".")[0]).__file__ or ""
        if not found.startswith(f"{self.checkout}/"):
            raise RuntimeError(f"{module} is taken from {found}, which is not in {self.checkout}")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0

    def _digested(self, run: Run, said: dict[str, Path]) -> dict[str, Any]:
        """In a process of its own, for pyarrow has threads."""
        into = self.place / "digest.json"

        def work() -> int:
            digest = Digest(((str(self.place), "PLACE"), (str(self.checkout), "CHECKOUT")))
            told: dict[str, Any] = {
                "files": digest.folder(self.place / "out" / run.name),
                "cache": digest.cache(self.place / "cache" / run.name),
            }
            if run.printed:
                out, err = (digest.plain(said[stream].read_text()) for stream in ("stdout", "stderr"))
                told["printed"] = digest.rows(out) if run.printed == "all" else numbers(out)
                told["figures of stderr"] = numbers(err)
            into.write_text(json.dumps(told))
            return 0

        if wait_for([in_fork(work)]):
            raise RuntimeError(f"no digest of {run.name}")
        return json.loads(into.read_text())


def _launcher(checkout: Path) -> str:
    """The module that starts ranks, as the scripts call it."""
    return _first(r"-m (\S+) training\.step1_sft\.main", [checkout / "scripts/step1_sft.sh"])


def _program_named(checkout: Path, name: str) -> str:
    found = [*checkout.glob(f"training/{name}.py"), *checkout.glob(f"threestep/plugins/*/{name}.py")]
    found += [*checkout.glob(f"threestep/plugins/{name}/__main__.py")]
    found += checkout.glob(f"threestep/plugins/*/{name}/__main__.py")
    if name == "reward_evaluation":  # where it was until November 2026
        found += checkout.glob("training/step2_reward/evaluate.py")
    if len(found) != 1:
        raise SystemExit(f"expected one program {name} in {checkout}, got {found}")
    return ".".join(found[0].relative_to(checkout).with_suffix("").parts).removesuffix(".__main__")


def _cache_program(checkout: Path) -> str:
    if (checkout / "threestep/plugins/inspect/cache.py").is_file():
        return "threestep.plugins.inspect.cache"
    return _first(r"python -m (\S+) verify", sorted((checkout / "docs").rglob("*.md")))


def _recipe(checkout: Path, named: str) -> str:
    _, step, name = named.split(":")
    found = [path for path in checkout.rglob(f"configs/{name}.yaml") if step in path.parts]
    if len(found) != 1:
        raise SystemExit(f"expected one recipe {name} of {step} in {checkout}, got {found}")
    return str(found[0])


def _first(pattern: str, paths: Sequence[Path]) -> str:
    for path in paths:
        found = re.search(pattern, path.read_text())
        if found is not None:
            return found[1]
    raise SystemExit(f"none of {', '.join(map(str, paths))} has {pattern}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Digests.

# Figures of a clock or of what the machine has free.
CLOCK = re.compile(
    r"(^|[/_])(seconds|time|memory|mfu|per_second|peak)($|[/_])|per_second$|^seconds_|^(started|trained|waited)$"
)
CLOCK_FILES = ("seconds.json",)
# What names files and folders, or code, by their content.
FINGERPRINTS = re.compile(r"fingerprint|^path$|^built_at|^published")
# Not the same in two runs of one checkout. `resumed` of data_report.json says whether rank 0 built the data, and of
# several ranks any may be the first to come; PEFT writes adapter_config.json's target_modules, a set, in any order.
BY_CHANCE = ("resumed",)
SETS = ("target_modules",)
# Not looked into: events of tensorboard hold clock times (metrics.jsonl has the same figures); DeepSpeed's checkpoints
# are pickles (what a resumed run and an export make of them is digested); traces.
SKIPPED_FOLDERS = ("tensorboard", "checkpoints", "profile")


@dataclass(frozen=True)
class Digest:
    """names: strings that differ from record to record, and what stands for them."""

    names: tuple[tuple[str, str], ...]

    def plain(self, text: str) -> str:
        for name, stand_in in self.names:
            text = text.replace(name, stand_in)
        return text

    def folder(self, root: Path) -> dict[str, Any]:
        """By file name: tensors, values of JSON and YAML, otherwise a hash of the bytes."""
        return {
            path.relative_to(root).as_posix(): self._file(path)
            for path in _files(root)
            if not set(path.relative_to(root).parts[:-1]) & set(SKIPPED_FOLDERS)
            and not path.name.startswith(".")
            and path.name not in CLOCK_FILES
        }

    def _file(self, path: Path) -> Any:
        if path.suffix == ".safetensors":
            return tensors(path)
        if path.name == "tokenizer.json":
            return _sha256(path.read_bytes())
        if path.suffix == ".json":
            return self.cleaned(json.loads(path.read_text()))
        if path.suffix == ".jsonl":
            return [self.cleaned(json.loads(line)) for line in path.read_text().splitlines()]
        if path.suffix in (".yaml", ".yml"):
            import yaml

            return self.cleaned(yaml.safe_load(path.read_text()))
        if path.suffix == ".html":  # its wording may change, its clock times do
            return {"charts": len(re.findall("<svg", path.read_text(errors="replace")))}
        if path.suffix == ".md":  # a model card names files of the checkout
            return _sha256(self.plain(path.read_text()).encode())
        return _sha256(path.read_bytes())

    def cleaned(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: sorted(inner) if name in SETS and isinstance(inner, list) else self.cleaned(inner)
                for name, inner in value.items()
                if not CLOCK.search(name) and not FINGERPRINTS.search(name) and name not in BY_CHANCE
            }
        if isinstance(value, list):
            return [self.cleaned(inner) for inner in value]
        return self.plain(value) if isinstance(value, str) else value

    def rows(self, text: str) -> Any:
        """Objects where every line is one, else lines but for headings."""
        try:
            return [self.cleaned(json.loads(line)) for line in text.splitlines()]
        except ValueError:
            return [line for line in text.splitlines() if not line.startswith("==")]

    def cache(self, root: Path) -> list[Any]:
        """The rows of each file of the cache by column, whatever the file is called."""
        found = []
        for path in _files(root):
            if path.suffix == ".arrow":
                found.append(_columns(path))
            elif path.suffix == ".safetensors":
                found.append(tensors(path))
        return sorted(found, key=lambda one: json.dumps(one, sort_keys=True))


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _columns(path: Path) -> dict[str, Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        table = pyarrow.ipc.open_file(file).read_all()
        columns = {
            name: _sha256(json.dumps(table[name].to_pylist(), default=str).encode()) for name in table.column_names
        }
        return {"rows": table.num_rows, **columns}


def tensors(path: Path) -> dict[str, str]:
    """By name: kind, shape and hash."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    return {
        name: f"{entry['dtype']} {entry['shape']} {_sha256(body[slice(*entry['data_offsets'])])}"
        for name, entry in sorted(header.items())
        if name != "__metadata__"
    }


_NOT_FIGURES = re.compile(
    r"PLACE\S*|CHECKOUT\S*|\b[0-9a-f]{12,}\b|[\w.]*/[\w./-]+|\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?"  # paths, dates
    r"|[\d.,]+ [kMGT]?B\b|used [\d.]+ days"  # sizes of folders with manifests, ages
    r"|[\d.,]+ (s|ms|seconds?|minutes?|min|h|hours?)\b(?!/)|[\d.,]+ (\w+ )?a second"  # times, speeds
)
_FIGURE = re.compile(r"(?<![\w.])[-+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[-+]?\d+)?")


def numbers(text: str) -> list[str]:
    """The sequence of numbers in a text, but for those of a clock and those in names."""
    return _FIGURE.findall(_NOT_FIGURES.sub(" ", text))


# The two commands.


def chosen(only: Sequence[str]) -> list[Run]:
    """The runs of these names, and those that they need, in order."""
    by_name = {run.name: run for run in RUNS}
    unknown = set(only) - by_name.keys()
    if unknown:
        raise SystemExit(f"there are no runs {', '.join(sorted(unknown))}")
    wanted, left = set(), list(only or by_name)
    while left:
        name = left.pop()
        if name not in wanted:
            wanted.add(name)
            left += [need for need in by_name[name].needs() if need in by_name]
            if by_name[name].module == "CACHE":
                left.append("sft_fp32")
    return [run for run in RUNS if run.name in wanted]


def record(checkout: Path, out: Path, only: Sequence[str], place: Path) -> int:
    runs = chosen(only)
    os.environ.update(ENVIRONMENT)
    import_packages()
    if wait_for([in_fork(lambda: make_files(place) or 0)]):
        raise SystemExit("the data and models that the runs start from could not be made")
    recorder = Recorder(checkout.resolve(), place)
    told: dict[str, Any] = {}
    for run in runs:
        told[run.name] = recorder.run(run)
        failed = told[run.name].get("failed")
        print(f"{run.name}: {told[run.name]['seconds']} s{', FAILED' if failed else ''}", flush=True)
        if failed:
            print("\n".join(failed), file=sys.stderr, flush=True)
        out.write_text(json.dumps({"runs": told}, indent=1))
    return int(any("failed" in one for one in told.values()))


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Where two values differ, the first of each list alone."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            if name not in after or name not in before:
                yield f"{where}{name} is {'gone' if name in before else 'new'}"
            else:
                yield from differences(before[name], after[name], f"{where}{name} ")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{where}has {len(before)} entries, then {len(after)}"
        for number, (one, other) in enumerate(zip(before, after, strict=False)):
            if one != other:
                step = f", step {one['step']}" if isinstance(one, dict) and "step" in one else ""
                yield from differences(one, other, f"{where}[{number}{step}] ")
                return
    elif before != after or type(before) is not type(after):
        yield f"{where}{before!r:.120} -> {after!r:.120}"


def compare(before: Path, after: Path) -> int:
    # NaN as text: it is not equal to itself.
    one, other = (json.loads(path.read_text(), parse_constant=str)["runs"] for path in (before, after))
    differs = False
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            found = [f"only in {(before if name in one else after).name}"]
        else:
            parts = [{key: value for key, value in told[name].items() if key != "seconds"} for told in (one, other)]
            found = list(differences(*parts))
            failed = [path.name for path, part in zip((before, after), parts, strict=True) if "failed" in part]
            found = [f"failed in {' and '.join(failed)}"] if failed else found
        print(f"{name}: {'identical' if not found else 'DIFFERS: ' + '; '.join(found[:12])}")
        differs = differs or bool(found)
    return int(differs)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("record", help="run everything, write digests")
    asked.add_argument("--checkout", type=Path, required=True)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these runs, and those that they need")
    asked.add_argument("--place", type=Path, help="an empty folder that is kept; default: a temporary one")
    asked = commands.add_parser("compare", help="tell what differs")
    asked.add_argument("before", type=Path)
    asked.add_argument("after", type=Path)
    flags = parser.parse_args(argv)
    if flags.command == "compare":
        return compare(flags.before, flags.after)
    # Not a TemporaryDirectory, which the exit functions of every fork would remove.
    place = (flags.place or Path(tempfile.mkdtemp(prefix="same_runs_"))).resolve()
    place.mkdir(parents=True, exist_ok=True)
    try:
        return record(flags.checkout, flags.out, flags.only, place)
    finally:
        if flags.place is None:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
