"""Attention kernels for CUDA: torch's for packed sequences, FlexAttention, FlashAttention."""

from training.utils.plugins.plugin import AttentionEntry, Plugin

PLUGIN = Plugin(
    "kernels",
    "attention kernels for CUDA: varlen, flex_attention, FlashAttention",
    tables={
        "attention_kernels": {
            "varlen": AttentionEntry(
                f"{__name__}.kernels:VarlenKernel",
                " (torch's kernel for packed sequences, bf16 and fp16)",
                by_auto=True,
            ),
            "flex_attention": AttentionEntry(f"{__name__}.kernels:FlexKernel", by_auto=True),
            "flash_attention_2": AttentionEntry(
                f"{__name__}.kernels:FlashKernel", " (if installed) packs rows but cannot share prompts"
            ),
            "flash_attention_3": AttentionEntry(f"{__name__}.kernels:FlashKernel", " does the same"),
        },
    },
)
