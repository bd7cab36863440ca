"""The command lines of DeepSpeed-Chat's own training scripts, as data: the flags that each of them has, with values.

ZeRO stages and models are those that a script takes by default; a sweep is every combination that it runs. ACTOR and
CRITIC stand for what a user gives; where a run is written is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

_FOUR = (
    "--data_path Dahoas/rm-static Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise "
    "yitingxie/rlhf-reward-datasets --data_split 2,4,4"
)
_ONE = "--data_path Dahoas/rm-static --data_split 2,4,4"
_SCHEDULE = "--lr_scheduler_type cosine --num_warmup_steps 0 --seed 1234 --deepspeed --max_seq_len 512"
_BOARD = "--enable_tensorboard --tensorboard_path out"
_LORA = "--lora_dim 128 --lora_module_name decoder.layers."
_RECOMPUTED = "--gradient_checkpointing"
_LLAMA = "--model_name_or_path meta-llama/Llama-2-7b-hf"


@dataclass(frozen=True)
class ScriptLine:
    """step: sft, reward, dpo or ppo. name: of the script. flags: behind main.py. launcher: before it."""

    step: str
    name: str
    flags: str
    launcher: str = ""


def _sft(name: str, data: str, model: str, batch: int, rate: str, zero: int, *more: str) -> ScriptLine:
    """`more` comes last, so that it overrides."""
    sizes = f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch} --learning_rate {rate}"
    flags = (
        f"{data} --model_name_or_path {model} {sizes} --weight_decay 0. --num_train_epochs 16 "
        f"--gradient_accumulation_steps 1 {_SCHEDULE} --zero_stage {zero}"
    )
    return ScriptLine("sft", name, " ".join([flags, *more]))


def _sft_lines() -> Iterator[ScriptLine]:
    for name, lora in (("", ""), ("_lora", "--lora_dim 128 --lora_module_name layers.")):
        more = f"--num_train_epochs 4 {_RECOMPUTED} {lora}"
        yield _sft(f"llama2/run_llama2_7b{name}", _FOUR, "meta-llama/Llama-2-7b-hf", 4, "9.65e-6", 3, more)
    yield ScriptLine(
        "sft",
        "single_gpu/run_1.3b",
        f"--model_name_or_path facebook/opt-1.3b --gradient_accumulation_steps 8 --lora_dim 128 --zero_stage 0 "
        f"{_BOARD} --deepspeed",
        "--num_gpus 1",
    )
    one_gpu = f"{_RECOMPUTED} {_LORA} --gradient_accumulation_steps 16"
    alone = _sft("single_gpu/run_6.7b_lora", _FOUR, "facebook/opt-6.7b", 8, "1e-3", 0, one_gpu)
    yield replace(alone, launcher="--num_gpus 1")
    yield _sft("single_node/run_1.3b", _FOUR, "facebook/opt-1.3b", 8, "9.65e-6", 2, _BOARD)
    only = f"{_LORA} --only_optimize_lora --weight_decay 0.1"
    yield _sft("single_node/run_1.3b_lora", _FOUR, "facebook/opt-1.3b", 8, "1e-3", 0, only)
    yield _sft("single_node/run_6.7b", _FOUR, "facebook/opt-6.7b", 6, "9.65e-6", 3, _RECOMPUTED)
    yield _sft("single_node/run_13b", _FOUR, "facebook/opt-13b", 4, "1e-4", 3, _RECOMPUTED, _LORA)
    yield _sft("single_node/run_30b_lora", _FOUR, "facebook/opt-30b", 4, "9.65e-6", 3, _RECOMPUTED, "--lora_dim 128")
    many = f"{_RECOMPUTED} {_LORA} --weight_decay 0.1 --num_train_epochs 2"
    yield _sft("multi_node/run_66b", _FOUR, "facebook/opt-66b", 4, "1e-4", 3, many)
    for zero, offload, lora in product((2, 3), ("--offload", ""), (True, False)):
        rate, adapters = ("1e-3", only) if lora else ("9.65e-6", "--lora_dim 0")
        yield _sft("single_node/sweep", _FOUR, "facebook/opt-1.3b", 8, rate, zero, adapters, offload)
    chinese = "wangrui6/Zhihu-KOL Cohere/miracl-zh-queries-22-12 Hello-SimpleAI/HC3-Chinese mkqa-Chinese"
    japanese = "mkqa-Japanese Cohere/miracl-ja-queries-22-12 lmqg/qg_jaquad lmqg/qag_jaquad"
    for name, data, model in (
        ("chinese", chinese, "bigscience/bloom-1b1"),
        ("japanese", japanese, "sberbank-ai/mGPT"),
    ):
        yield _sft(f"other_language/run_{name}", f"--data_path {data} --data_split 10,0,0", model, 8, "9.65e-6", 2)


def _step_2_lines(step: str, padding: bool) -> Iterator[ScriptLine]:
    """Of the reward model and of DPO, which differ in --num_padding_at_beginning alone."""
    shared = f"--weight_decay 0.1 --num_train_epochs 1 --gradient_accumulation_steps 1 {_SCHEDULE}"
    opt = f"--model_name_or_path facebook/opt-350m --dropout 0.0{' --num_padding_at_beginning 1' * padding}"

    def line(name: str, data: str, batch: int, rate: str, zero: int, more: str) -> ScriptLine:
        sizes = f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch} --learning_rate {rate}"
        return ScriptLine(step, name, f"{data} {sizes} {shared} --zero_stage {zero} {more}")

    llama = f"{_LLAMA} {_RECOMPUTED} --offload{' --num_padding_at_beginning 0' * padding}"
    for name, lora in (("", ""), ("_lora", " --lora_dim 128 --lora_module_name layers.")):
        yield line(f"llama2/run_llama2_7b{name}", _ONE, 8, "9.65e-6", 3, llama + lora)
    bare = f"{opt} --weight_decay 0.1 --gradient_accumulation_steps 4 --zero_stage 0 {_BOARD} --deepspeed"
    yield ScriptLine(step, "single_gpu/run_350m", bare, "--num_gpus 1")
    yield line("single_node/run_350m", _FOUR, 4, "5e-5", 0, opt)
    yield line("multi_node/run_350m", _FOUR, 2, "5e-5", 0, opt)
    for zero, offload in product((2, 3), (" --offload", "")):
        yield line("single_node/sweep", _FOUR, 4, "5e-5", zero, f"{opt} --num_padding_at_beginning 1{offload}")


_ROLES = "--actor_model_name_or_path ACTOR --critic_model_name_or_path CRITIC --num_padding_at_beginning 1 --deepspeed"
_PPO = (
    f"{_ONE} {_ROLES} --generation_batches 1 --ppo_epochs 1 --max_answer_seq_len 256 --max_prompt_seq_len 256 "
    "--critic_learning_rate 5e-6 --num_train_epochs 1 --lr_scheduler_type cosine --actor_dropout 0.0 "
    "--num_warmup_steps 100 --seed 1234"
)
_DECAY = "--actor_weight_decay 0.1 --critic_weight_decay 0.1"
_ACTOR_LORA = "--actor_lora_dim 128 --actor_lora_module_name decoder.layers."
_HYBRID = "--enable_hybrid_engine"


def _ppo(name: str, batch: int, rate: str, zero: int, more: str, launcher: str = "--master_port 12346") -> ScriptLine:
    """`more` comes last, so that it overrides."""
    sizes = f"--per_device_generation_batch_size {batch} --per_device_training_batch_size {batch}"
    stages = f"--actor_zero_stage {zero} --critic_zero_stage {zero} --gradient_accumulation_steps 1"
    return ScriptLine("ppo", name, f"{_PPO} {sizes} --actor_learning_rate {rate} {stages} {more}", launcher)


def _ppo_lines() -> Iterator[ScriptLine]:
    recomputed = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
    llama = f"{_DECAY} {recomputed} --offload_reference_model"
    both = "--actor_lora_dim 64 --critic_lora_dim 64 --critic_lora_module_name layers. --actor_lora_module_name layers."
    for name, more in (
        ("", _HYBRID),
        ("_lora", f"{_HYBRID} {both}"),
        ("_mixz", f"--enable_mixed_precision_lora {both}"),
    ):
        yield _ppo(f"llama2/run_llama2_7b{name}", 1, "9.65e-6", 3, f"{llama} {more}")
    bare = (
        f"{_ROLES} --actor_zero_stage 0 --critic_zero_stage 0 --gradient_accumulation_steps 2 --actor_lora_dim 128 "
        f"{_HYBRID} --actor_gradient_checkpointing --actor_dropout 0.0"
    )
    yield ScriptLine("ppo", "single_gpu/run_1.3b", bare, "--num_gpus 1")
    one_gpu = f"--gradient_accumulation_steps 16 --actor_lora_dim 128 {recomputed} {_HYBRID}"
    yield _ppo("single_gpu/run_6.7b_lora", 8, "5e-4", 0, one_gpu, "--num_gpus 1")
    yield _ppo("single_node/run_1.3b", 4, "9.65e-6", 2, f"{_HYBRID} --enable_ema {_BOARD}")
    yield _ppo("single_node/run_1.3b_lora", 4, "9.65e-6", 2, f"{_HYBRID} {_ACTOR_LORA}")
    large = f"{_HYBRID} --actor_gradient_checkpointing"
    yield _ppo("single_node/run_6.7b", 4, "9.65e-6", 3, f"{large} {_DECAY}")
    yield _ppo("single_node/run_13b", 16, "5e-4", 3, f"{large} {_ACTOR_LORA} --inference_tp_size 2")
    yield _ppo("single_node/run_30b_lora", 4, "5e-4", 3, f"{large} {_ACTOR_LORA}")
    tensor_parallel = "--inference_tp_size 8 --tp_gather_partition_size 4"
    yield _ppo("multi_node/run_66b", 4, "5e-4", 3, f"{large} {_ACTOR_LORA} {_DECAY} {tensor_parallel}")
    swept = "--actor_weight_decay 0 --critic_weight_decay 0 --print_answers"
    sweep = product((2, 3), (_HYBRID, ""), ("--offload", ""), (_ACTOR_LORA, "--actor_lora_dim 0"))
    mixed = [(3, hybrid, "--enable_mixed_precision_lora", _ACTOR_LORA) for hybrid in (_HYBRID, "")]
    for zero, *more in [*sweep, *mixed]:
        yield _ppo("single_node/sweep", 4, "9.65e-6", zero, " ".join([swept, *more]), "--num_nodes=1")


LINES: tuple[ScriptLine, ...] = (
    *_sft_lines(),
    *_step_2_lines("dpo", padding=False),
    *_step_2_lines("reward", padding=True),
    *_ppo_lines(),
)

# Of its evaluation scripts, whose programs have others in their places: by script, our program's words and the flags.
EVALUATION_LINES = {
    "step1 evaluation_scripts/run_prompt": (
        "threestep evaluate win_rate",
        "--model_name_or_path_baseline XXX --model_name_or_path_finetune XXX",
    ),
    "step2 evaluation_scripts/run_eval": ("threestep evaluate pairs", "--model_name_or_path XXX"),
}
