"""Published speeds of training: facts from the tables of others, with what they say of their settings.

Sources: F mosaicml/llm-foundry 8c8dd48, scripts/train/benchmarking/README.md (FSDP, all weights in bf16, attention by
the Triton kernel of FlashAttention 1: submit_benchmarks.py). T pytorch/torchtitan b5bcd76, benchmarks/. A NVIDIA NeMo
Automodel 36044ad, docs/performance-summary.mdx, and examples/llm_benchmark (LoRA of rank 16 on all matrices). B NVIDIA
Megatron-Bridge 067f987, docs/performance-summary-archive.md. U pytorch/torchtune bd2a0fc, README.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """device: of `DEVICES`, or torchtitan's H100. tokens: of a row. recomputed: share of a forward. published: tokens a
    second and GPU."""

    source: str
    device: str
    model: str
    tokens: int
    gpus: int
    rows: int
    micro_steps: int
    settings: str
    published: float

    @property
    def name(self) -> str:
        batch = f"{self.rows} x {self.tokens}" + (f" x {self.micro_steps}" if self.micro_steps > 1 else "")
        return f"{self.source} {self.device} x {self.gpus}, {self.model}, {batch}" + (
            f", {self.settings}" if self.settings else ""
        )


# A line: source, device, model, thousands of tokens in a row, GPUs, rows, micro-steps, settings, tokens/s a GPU.
# Settings: R recomputes, S recomputes half, C compiled, 8 fp8, L LoRA, 2 tensor parallel over two GPUs, D DDP-like.
_TABLE = """
F h100 mpt-70b 2 512 8 1 R 1007
F h100 mpt-70b 2 128 8 1 R 1058
F h100 mpt-70b 2 64 8 4 R 1039
F h100 mpt-70b 2 32 2 16 R 882
F h100 mpt-30b 8 8 1 21 R 1384
F h100 mpt-30b 2 8 3 21 R 2002
F h100 mpt-13b 32 8 1 3 R 1976
F h100 mpt-13b 2 8 2 1 - 4792
F h100 mpt-7b 64 8 1 2 R 1956
F h100 mpt-7b 8 8 8 2 R 6935
F h100 mpt-7b 2 8 6 1 - 10643
F h100 mpt-7b 2 512 6 1 - 9670
F h100 mpt-1b 2 8 14 1 - 45455
F h100 mpt-1b 32 8 1 4 - 12025
F a100 mpt-70b 2 64 8 4 R 410
F a100 mpt-70b 2 32 2 16 R 373
F a100 mpt-30b 8 8 1 21 R 574
F a100 mpt-30b 2 8 3 21 R 916
F a100 mpt-7b 64 8 1 2 R 1013
F a100 mpt-7b 8 8 8 2 R 3206
F a100 mpt-7b 2 8 6 2 - 4641
F a100 mpt-1b 2 8 14 4 - 20513
F a100 mpt-125m 2 8 32 2 - 141737
F a100-40 mpt-70b 2 128 4 1 R 376
F a100-40 mpt-70b 2 64 2 1 R 276
F a100-40 mpt-13b 2 8 4 16 R 1668
F a100-40 mpt-7b 2 128 18 1 R 3623
F a100-40 mpt-1b 2 32 10 1 - 15555
T h100-titan llama3-8b 8 8 2 1 S 5762
T h100-titan llama3-8b 8 8 2 1 SC 6667
T h100-titan llama3-8b 8 8 2 1 SC8 8532
T h100-titan llama3-8b 8 128 2 1 S 5605
T h100-titan llama3-8b 8 128 2 1 SC 6514
T h100-titan llama3-8b 8 128 2 1 SC8 8380
T h200 llama3-8b 8 32 2 1 SC8 10938
T h200 llama3-8b 8 64 2 1 SC8 10753
A h100 llama3-8b 4 1 2 16 L 12473
A h100 qwen2.5-7b 4 1 2 16 L 14110
A h100 llama3-70b 4 8 2 4 LRC2 1092
A h100 llama3-70b 4 16 2 2 LRC2 985
A h100 qwen2.5-32b 4 8 2 4 LRC2 2250
A h100 qwen2.5-32b 4 16 2 2 LRC2 2073
B h100 llama3-8b 8 8 1 16 C8 14451
B b200 llama3-8b 8 8 2 8 C8 30624
U rtx4090 llama3-8b 2 1 2 1 RC 1650
U rtx4090 llama3-8b 2 1 2 1 LRC 3083
U a100 llama3.2-3b 4 1 2 1 C 8998
U a100 llama3.2-3b 4 1 2 1 RC 7210
"""


def published_rows() -> list[Row]:
    """Every row, in the order of its source."""
    rows = []
    for line in _TABLE.strip().splitlines():
        source, device, model, thousands, *numbers, settings, published = line.split()
        gpus, batch, steps = map(int, numbers)
        settings = "" if settings == "-" else settings
        rows.append(Row(source, device, model, int(thousands) * 1024, gpus, batch, steps, settings, float(published)))
    return rows
