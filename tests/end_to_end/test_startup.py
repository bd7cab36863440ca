"""A small run imports what it needs: seconds before its first step are mostly imports."""

from __future__ import annotations

import json
import subprocess
import sys

# Large, and none of them needed for a few rows of text and a step on a CPU.
HEAVY = (
    "datasets", "gradio", "IPython", "matplotlib", "pandas", "peft", "polars", "scipy", "sklearn", "torchvision",
    "vllm", "wandb",
    "torch._inductor.compile_fx",
)  # fmt: skip

PROGRAM = """
import runpy, sys
sys.argv = ["main", *sys.argv[2:]]
runpy.run_module("training.step1_sft.main", run_name="__main__", alter_sys=True)
print("IMPORTED", *sys.modules)
"""


def test_a_tiny_run_imports_nothing_heavy_that_it_does_not_need(tmp_path, tiny_llama_config, tiny_tokenizer):
    from transformers import LlamaForCausalLM

    start, rows = tmp_path / "start", tmp_path / "rows.jsonl"
    LlamaForCausalLM(tiny_llama_config).save_pretrained(start)
    tiny_tokenizer.save_pretrained(start)
    rows.write_text("".join(json.dumps({"prompt": f"a {n}", "completion": f" b {n}"}) + "\n" for n in range(8)))
    flags = {
        "model_name_or_path": start, "data_path": rows, "data_split": "1,0,0", "max_train_steps": 1,
        "max_seq_len": 64, "per_device_train_batch_size": 2,
        "output_dir": tmp_path / "run", "data_output_path": tmp_path / "cache",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, "-c", PROGRAM, "main", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()
    imported = set(done.stdout.rpartition("IMPORTED ")[2].split())
    assert "torch" in imported and "deepspeed" in imported and "pyarrow" in imported
    assert [name for name in HEAVY if name in imported] == []
