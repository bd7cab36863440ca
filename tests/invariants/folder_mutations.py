"""Model folders with one file changed: each run ends at its start in a sentence, or in a saved model that opens.

    python -m tests.invariants.folder_mutations --count 1000 --first 300

is the long form of test_folder_mutations.py: 0.5 seconds of CPU a case. A case is made from its number alone, so that
one that fails can be run again. Each is a run of a step by its command line, of one optimizer step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForSequenceClassification,
)  # fmt: skip

from tests.end_to_end.conftest import pair_rows, save_start
from tests.invariants.mutations import CHAT_TEMPLATE, JUNK, Case, command_line, damage_bytes, write_jsonl
from tests.support.forked_programs import run_python
from threestep.plugins.programs import new_model

LIMIT_SECONDS = 120.0  # a case takes half of one on an idle core
TEXT, SHARDED, IMAGES, ADAPTER = "text", "sharded", "images", "adapter"
_SHARED = "--max_train_steps 1 --report false --num_workers 1 --eval_fraction 0"
_ONE_MODEL = f"{_SHARED} --max_seq_len 100 --per_device_train_batch_size 2 --report_mfu false --dtype fp32"
_PPO = (
    f"{_SHARED} --max_prompt_seq_len 64 --max_answer_seq_len 4 --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 2 --dtype fp32 --data_split 1,1,1 --report_mfu false"
)
# A run: its program, flags, and the rows that it takes; START is the folder with the changed file.
_SFT = f"--model_name_or_path START {_ONE_MODEL} --data_split 1,0,0"
_PAIRED = f"--model_name_or_path START {_ONE_MODEL} --data_split 0,1,0"
_RUNS: dict[str, tuple[str, str, str]] = {
    "sft": ("step1_sft", _SFT, "pairs"),
    "sft with checkpoints": ("step1_sft", f"{_SFT} --save_every 1", "pairs"),
    "sft with LoRA": ("step1_sft", f"{_SFT} --lora_dim 2", "pairs"),
    "sft of a chat": ("step1_sft", f"{_SFT} --prompt_style chat_template", "chats"),
    "sft of images": ("step1_sft", f"{_SFT} --prompt_style chat_template", "images"),
    "reward": ("step2_reward", _PAIRED, "pairs"),
    "dpo": ("step2_dpo", _PAIRED, "pairs"),
    "ppo": (
        "step3_ppo", f"--actor_model_name_or_path START --critic_model_name_or_path SCORER {_PPO} --enable_ema", "pairs"
    ),
    "ppo with a changed critic": (
        "step3_ppo", f"--actor_model_name_or_path TEXT --critic_model_name_or_path START {_PPO}", "pairs",
    ),
}  # fmt: skip
_TEXT_RUNS = ("sft", "sft", "sft", "sft with checkpoints", "sft with LoRA", "sft of a chat", "reward", "dpo", "ppo")


# What is changed.

_NUMBERS: list[Any] = [0, 1, -1, 3, 0.5, 2**31, 10**30, "7", "x", None, True, [], [1], {}, float("nan"), float("inf")]
# Values that a setting may have, right and wrong ones: of a kind each, beside what is drawn anywhere.
_GENERATION: dict[str, list[Any]] = {
    "temperature": [0.9, 0.0, -1.0, "0.9", None], "top_p": [0.9, 2.0, "x"], "top_k": [0, -5, 1.5],
    "do_sample": [True, "x"], "early_stopping": [True, "x", 3], "num_beams": [4, 0, "4"],
    "num_return_sequences": [3, 0], "max_length": [20, 0, "20"], "max_new_tokens": [0, 20],
    "pad_token_id": [-1, 10**6, "0"], "eos_token_id": [-1, [], [0, None], "0", [[0]], 10**6, 0.5, {}, True],
    "cache_implementation": ["x", "static"], "watermarking_config": [{}, {"greenlist_ratio": 0.25}, 3],
    "compile_config": [{}, {"mode": "x"}, 3], "suppress_tokens": [[1], 3], "bad_words_ids": [[[1]], []],
    "stop_strings": ["x", ["x"]], "repetition_penalty": [1.1, 0.0, "x"], "transformers_version": [3, "4.30.0"],
}  # fmt: skip
_QUANTIZED: list[Any] = [
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"load_in_8bit": True}, {"quant_method": "gptq", "bits": 4},
    {"quant_method": "fp8"}, {"quant_method": "compressed-tensors"}, {"quant_method": "magic"}, {"quant_method": 3}, {},
    {"bits": 4}, [], "fp8", 3, {"quant_method": "none"}, {"quant_method": "torchao"},
]  # fmt: skip
_CONFIG: dict[str, list[Any]] = {
    "quantization_config": _QUANTIZED, "text_config": [{"quantization_config": _QUANTIZED[0]}, {}, 3],
    "model_type": ["mistral", "gpt2", "bert", "t5", "magic", "", 3, None, "qwen2_vl"],
    "architectures": [[], None, ["Magic"], "LlamaForCausalLM", ["LlamaForSequenceClassification"], [3]],
    "dtype": ["bfloat16", "float8_e4m3fn", "int8", "x", 3, "auto", "torch.float16"], "torch_dtype": ["float16", "x"],
    "tie_word_embeddings": [False, "x", None], "vocab_size": [*_NUMBERS, 383, 1000], "hidden_act": ["gelu", "x", None],
    **dict.fromkeys(
        ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
         "max_position_embeddings", "initializer_range", "hidden_size"), _NUMBERS,
    ),
    "rope_parameters": [{"rope_type": "x"}, {"rope_type": "yarn"}, {"rope_type": "dynamic", "factor": 2.0}, 3, {}, None,
                        {"rope_type": "default", "rope_theta": -1.0}, {"rope_type": "linear", "factor": "x"}],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "llama3"}, 3],
    "attention_dropout": [0.5, 2.0, "x"], "attention_bias": [True, "x"], "sliding_window": [4, "x"],
    "layer_types": [["full_attention"], ["x", "x"], 3], "attn_implementation": ["eager", "x", "flash_attention_2"],
    "auto_map": [{"AutoModelForCausalLM": "modeling.Magic"}, 3], "transformers_weights": ["x.safetensors", 3],
    "id2label": [{"0": "a"}, {"a": "b"}, 3], "num_labels": [1, 3, "x"], "problem_type": ["regression", "x"],
    "is_encoder_decoder": [True], "output_attentions": [True, "x"], "return_dict": [False],
    "pruned_heads": [{"0": [0]}], "tokenizer_class": ["Magic"], "base_model_tp_plan": [{"x": "y"}, 3], **_GENERATION,
}  # fmt: skip
_TOKENS: list[Any] = ["<|endoftext|>", "</s>", "a", "", None, 3, {}, {"content": "<|endoftext|>"},
                      {"content": "</s>", "__type": "AddedToken"}, ["<|pad|>"]]  # fmt: skip
_TEMPLATES: list[Any] = [
    "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ messages[0]['content'] }}", "{% if %}", "{{ x.y.z }}", "",
    "{{ raise_exception('no') }}", "plain", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{% include 'x' %}", 3, {},
    [{"name": "default", "template": "{{ messages }}"}], [{"name": "rag", "template": "x"}], {"default": "{{ x }}"},
    None, "{{ strftime_now('%Y') }}", "{% generation %}x{% endgeneration %}",
]  # fmt: skip
_SPECIAL: dict[str, list[Any]] = {
    **dict.fromkeys(("eos_token", "pad_token", "bos_token", "unk_token"), _TOKENS),
    "additional_special_tokens": [["<|pad|>"], ["<new>"], "x", [3]],
    "extra_special_tokens": [["<new>"], {"image_token": "<image>"}, 3],
}  # fmt: skip
_TOKENIZER_CONFIG: dict[str, list[Any]] = {
    **_SPECIAL, "chat_template": _TEMPLATES, "model_max_length": [*_NUMBERS, 5], "padding_side": ["left", "x", 3],
    "truncation_side": ["left", "x"], "clean_up_tokenization_spaces": [True, "x"], "auto_map": [{}, {"x": "y"}],
    "tokenizer_class": ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "T5Tokenizer", "Magic", 3, None,
                        "PreTrainedTokenizer", "TokenizersBackend"],
    "added_tokens_decoder": [{"0": {"content": "x"}}, {"x": {"content": "x"}}, {"9999": {"content": "<new>"}}, 3,
                             {"0": "x"}, {"1": {"content": "<|pad|>", "special": False}}],
    "add_bos_token": [True, "x"], "add_prefix_space": [True, None, 3], "split_special_tokens": [True],
    "backend": ["x", "tokenizers"], "model_input_names": [["input_ids"], "x"], "tokenizer_file": ["x.json", 3],
}  # fmt: skip
_PREPROCESSOR: dict[str, list[Any]] = {
    "size": [{}, {"height": 28, "width": 28}, 28, {"shortest_edge": 10**9, "longest_edge": 1}, "x", None],
    "patch_size": [0, 7, -14, "x"], "merge_size": [0, 1, 3, "x"], "temporal_patch_size": [1, 0, "x"],
    "image_mean": [[0.5], "x", [0.5, 0.5, "x"], None], "image_std": [[0.0, 0.0, 0.0], [1.0], None],
    "do_resize": [False, "x"], "do_normalize": [False], "rescale_factor": [0, "x"], "resample": [99, "x", 2],
    "image_processor_type": ["Magic", "CLIPImageProcessor", 3, "Qwen2VLImageProcessor"], "max_pixels": [1, "x"],
    "auto_map": [{"AutoImageProcessor": "x.Magic"}], "backend": ["torchvision"],
}  # fmt: skip
_ADAPTER_CONFIG: dict[str, list[Any]] = {
    "r": [*_NUMBERS, 4], "lora_alpha": _NUMBERS, "target_modules": [[], ["x"], "x", "all-linear", None, 3, ["q_proj"]],
    "peft_type": ["LORA", "MAGIC", "IA3", "PROMPT_TUNING", 3, None], "task_type": ["SEQ_CLS", "x", None],
    "base_model_name_or_path": ["", "x", 3, None, "..", "/no/where"], "bias": ["all", "x"], "use_rslora": [True, "x"],
    "modules_to_save": [["lm_head"], "x", 3], "layers_to_transform": [[0], [99], "x"], "use_dora": [True],
    "init_lora_weights": [False, "x", "pissa"], "rank_pattern": [{"q_proj": 4}, 3], "alpha_pattern": [{"q_proj": "x"}],
    "lora_dropout": [0.5, 2.0, "x"], "inference_mode": [False], "peft_version": ["0.0", 3],
    "trainable_token_indices": [[1], 3], "layer_replication": [[[0, 1]]], "target_parameters": [["x"]],
}  # fmt: skip


def _value(dice: random.Random, file: str, known: dict[str, list[Any]], content: dict[str, Any]) -> str:
    """Change one value of a JSON object, in place; return the change in words."""
    if dice.random() < 0.75:
        name = dice.choice(list(known))
        content[name] = dice.choice(known[name])
        return f"{name} = {json.dumps(content[name])[:120]}"
    return _anywhere(dice, content)


def _anywhere(dice: random.Random, content: Any, where: str = "") -> str:
    """Change, remove or add a value at some depth."""
    places = list(content) if isinstance(content, dict) else list(range(min(len(content), 50)))
    place = dice.choice(places) if places else None
    inner = content[place] if place is not None else None
    if isinstance(inner, (dict, list)) and inner and dice.random() < 0.75:
        return _anywhere(dice, inner, f"{where}.{place}")
    kind = dice.randrange(5)
    if kind == 0 and place is not None:
        del content[place]
        return f"{where}.{place} removed"
    new = dice.choice([*JUNK[:20], *_NUMBERS])
    if isinstance(content, dict):
        place = dice.choice(["x", ""]) if kind == 1 or place is None else place
        content[place] = new
    elif place is None or kind == 1:
        content.append(new)
    else:
        content[place] = new
    return f"{where}.{place} = {new!r:.120}"


def _json_file(known: dict[str, list[Any]], several: int = 1) -> Callable[[random.Random, Path], str]:
    def change(dice: random.Random, path: Path) -> str:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if dice.random() < 0.03:
            content, said = dice.choice(JUNK), "whole file"
        else:
            times = dice.randint(1, several)
            said = "; ".join(_value(dice, path.name, known, content) for _ in range(times))
        path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))
        return said

    return change


def _nested(dice: random.Random, path: Path) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    said = _anywhere(dice, content)
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))
    return said


def _template(dice: random.Random, path: Path) -> str:
    text = dice.choice([one for one in _TEMPLATES if isinstance(one, str)])
    path.write_text(text, encoding="utf-8")
    return repr(text)


def _header(dice: random.Random, path: Path) -> str:
    """Change one entry of the header of safetensors, of which the file's length stays right."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = dice.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    names = (name + ".SCB", name + "_scale_inv", "x." + name, "", name.replace("weight", "bias"))
    said, kind = name, dice.randrange(7)
    if kind == 0:
        entry["dtype"] = dice.choice(["I32", "U32", "F8_E4M3", "BF16", "F64", "X", 3, None, "F4", "F8_E8M0", "C64"])
    elif kind == 1:
        entry["shape"] = dice.choice([[], [-1], [10**12], entry["shape"][::-1], [*entry["shape"], 1], 3, ["x"], None])
    elif kind == 2:
        header[dice.choice(names)] = header.pop(name)
    elif kind == 3:
        del header[name]
    elif kind == 4:
        header["__metadata__"] = dice.choice([3, [], {"format": "x"}, {"format": "tf"}, {}, {"format": 3}, None])
    elif kind == 5:
        entry["data_offsets"] = dice.choice([[0, 0], [-4, 4], ["0", "x"], [0], None, [0, 10**15], [1.5, 2.5]])
    else:
        said = _anywhere(dice, header)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return f"{said}: {json.dumps(header.get(name))}"


def _bytes(dice: random.Random, path: Path) -> str:
    path.write_bytes(damage_bytes(dice, path.read_bytes()))
    return "bytes"


# Of each file: the folder that it is in, how often it is taken, how it is changed, and the runs that read it.
_FILES: dict[str, tuple[str, int, Callable[[random.Random, Path], str], tuple[str, ...]]] = {
    "config.json": (TEXT, 6, _json_file(_CONFIG, 2), (*_TEXT_RUNS, "ppo with a changed critic")),
    "generation_config.json": (TEXT, 5, _json_file(_GENERATION, 3), _TEXT_RUNS),
    "tokenizer_config.json": (TEXT, 4, _json_file(_TOKENIZER_CONFIG, 2), (*_TEXT_RUNS, "ppo with a changed critic")),
    "tokenizer.json": (TEXT, 2, _nested, _TEXT_RUNS),
    "special_tokens_map.json": (TEXT, 1, _json_file(_SPECIAL, 2), _TEXT_RUNS),
    "chat_template.jinja": (TEXT, 1, _template, ("sft of a chat", "sft of a chat", "sft", "reward")),
    "added_tokens.json": (TEXT, 1, _json_file({"<new>": [384, 0, "x"], "<|pad|>": [1, 2, None]}), _TEXT_RUNS),
    "model.safetensors.index.json": (SHARDED, 1, _nested, _TEXT_RUNS),
    "model.safetensors": (TEXT, 2, _header, _TEXT_RUNS),
    "preprocessor_config.json": (IMAGES, 2, _json_file(_PREPROCESSOR, 2), ("sft of images",)),
    "images: config.json": (IMAGES, 2, _nested, ("sft of images",)),
    "adapter_config.json": (ADAPTER, 2, _json_file(_ADAPTER_CONFIG, 2), ("sft", "sft with LoRA", "reward", "ppo")),
    "adapter_model.safetensors": (ADAPTER, 1, _header, ("sft", "sft with LoRA")),
}  # fmt: skip


# The folders, and a run on one.


def make_folders(place: Path) -> None:
    """Tiny models whose files are changed, a reward model, and rows."""
    save_start(place / TEXT, chat_template=CHAT_TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(place / TEXT)
    shutil.copytree(place / TEXT, place / SHARDED)
    (place / SHARDED / "model.safetensors").unlink()
    model.save_pretrained(place / SHARDED, max_shard_size="200KB")
    LlamaForSequenceClassification(AutoConfig.from_pretrained(place / TEXT, num_labels=1)).save_pretrained(
        place / "scorer"
    )
    AutoTokenizer.from_pretrained(place / TEXT).save_pretrained(place / "scorer")
    settings = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(place / ADAPTER)
    shape = "--hidden_size=32 --num_hidden_layers=1 --num_attention_heads=2 --vocab_size=300 --max_image_tokens=4"
    new_model.main([f"--out={place / IMAGES}", "--data_path", "embedded", "--vision", *shape.split()])
    Image.new("RGB", (56, 28), "red").save(place / "red.png")
    answer = {"role": "assistant", "content": "red"}
    chats = [{"messages": [{"role": "user", "content": f"Which colour, {n}?"}, answer]} for n in range(8)]
    pictured = {"messages": [{"role": "user", "content": "What is <image>?"}, answer], "images": ["red.png"]}
    for name, rows in (("pairs", pair_rows(12)), ("chats", chats), ("images", [pictured] * 8)):
        (place / f"{name}.jsonl").write_bytes(write_jsonl(rows))


def run_case(number: int, place: Path) -> Case:
    """Make and run the case of that number. place: what `make_folders` filled"""
    dice = random.Random(f"folder {number}")
    file = dice.choices(list(_FILES), [often for _, often, _, _ in _FILES.values()])[0]
    of, _, change, runs = _FILES[file]
    start, out = place / f"start_{number}", place / f"run_{number}"
    shutil.copytree(place / of, start)
    path, name = start / file.removeprefix("images: "), dice.choice(runs)
    if of == ADAPTER:
        settings = json.loads((start / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = str(place / TEXT)
        (start / "adapter_config.json").write_text(json.dumps(settings))
    said = (_bytes if dice.random() < 0.05 and path.is_file() else change)(dice, path)
    try:
        ended, words, problem = _ran(name, start, out, place)
    finally:
        shutil.rmtree(start)
        shutil.rmtree(out, ignore_errors=True)
    words = re.sub(r"\S*threestep_folders_\w+/", "", words)[:400]
    return Case(number, file, ended, problem, f"{said} [{name}]: {words}")


def _ran(name: str, start: Path, out: Path, place: Path) -> tuple[str, str, str | None]:
    """(how it ended, what it said last, what is wrong with that)"""
    module, flags, rows = _RUNS[name]
    folders = {"START": start, "SCORER": place / "scorer", "TEXT": place / TEXT}
    words = [str(folders.get(word, word)) for word in flags.split()]
    words += ["--data_path", f"jsonl:{place / f'{rows}.jsonl'}", "--data_output_path", str(place / "cache")]
    try:
        done = run_python(
            ["-m", f"training.{module}.main", *words, "--output_dir", str(out)], timeout_seconds=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "hung", "", f"took more than {LIMIT_SECONDS:g} seconds"
    return judged(done.returncode, done.stdout, done.stderr, out)


def judged(code: int, stdout: str, stderr: str, out: Path) -> tuple[str, str, str | None]:
    """(how a run ended, what it said last, what is wrong with that). out: its folder"""
    if code == 0:
        return "trained", _mended(stdout), why_unopened(out)
    metrics = out / "metrics.jsonl"
    trained = (metrics.is_file() and '"train/loss"' in metrics.read_text()) or (out / "checkpoints").is_dir()
    sentence = stderr.strip().rpartition("error: ")[2]
    if code != 2 or "Traceback (most" in stderr or not sentence.strip():
        return "failed", sentence, f"code {code}\n{stdout[-600:]}\n{stderr[-3500:]}"
    if trained:
        return "lost", sentence, f"refused after training: {sentence}"
    left = [path.name for path in out.glob("*") if path.name.startswith(".") or path.name.endswith(".partial")]
    return "refused", sentence, f"left {left}" if left else None


def _mended(said: str) -> str:
    return " | ".join(line for line in said.splitlines() if line.startswith("warning: ") or "quantiz" in line)


def why_unopened(out: Path) -> str | None:
    """Why plain transformers does not open what a run saved, and save it again; None if it does."""
    for folder in [path for path in (out / "model", out / "critic", out / "model_ema") if path.is_dir()]:
        try:
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as again:
                warnings.simplefilter("ignore")
                AutoTokenizer.from_pretrained(folder).save_pretrained(again)
                config = AutoConfig.from_pretrained(folder)
                model, report = getattr(transformers, config.architectures[0]).from_pretrained(
                    folder, output_loading_info=True
                )
                model.save_pretrained(again)
                if (folder / "generation_config.json").is_file():
                    GenerationConfig.from_pretrained(folder).validate(strict=True)
                if (folder / "preprocessor_config.json").is_file():
                    AutoImageProcessor.from_pretrained(folder, backend="pil").save_pretrained(again)
        except Exception as problem:  # noqa: BLE001 (what is looked for)
            return f"{folder.name} does not open: {type(problem).__name__}: {problem}"
        if report["missing_keys"] or report["mismatched_keys"]:
            return f"{folder.name} lacks {report['missing_keys']} {report['mismatched_keys']}"
    return None if (out / "model" / "config.json").is_file() else "no model"


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    home = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(home)


def run_cases(numbers: range) -> Iterator[Case]:
    """Run the cases of those numbers in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="threestep_folders_") as folder, _inside(folder):
        make_folders(Path(folder))
        for number in numbers:
            yield run_case(number, Path(folder))


if __name__ == "__main__":
    command_line(run_cases, 300)
