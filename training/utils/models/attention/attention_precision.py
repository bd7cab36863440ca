"""The precision in which a CPU computes attention: float32 for short runs of bfloat16 models.

torch's SDPA kernel for a CPU cuts queries into blocks of 32, 64 (from 192 queries) or 256 (from 768), and multiplies
block by block. Each of these small products costs more to set up in bfloat16, and more again for a length that it has
not met before, so that forward and backward of a run are faster in float32, casts included, and closer to float64's:
1.1 to 5 times as fast below 768 queries of a head of 64 (docs/lab_book.md: measured on one CPU with AVX512-BF16). A
lone query of a head, of a decoded token, is too; of 2 to 9 queries both take as long, and these stay in bfloat16.
The choice reads a run's length alone: its result does not depend on its neighbours, on the machine's load, or on
whether gradients are wanted. Imports torch alone.
"""

from __future__ import annotations

import torch

# Head size at most, and the number of queries from which bfloat16 is as fast.
_FLOAT32_BELOW = ((32, 1400), (64, 768))
_OTHERWISE = 384


def attention_dtype(queries: int, part: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute attention of `queries` tokens in. part: queries or keys, [..., head size]."""
    if part.dtype != torch.bfloat16 or part.device.type != "cpu":
        return part.dtype
    most = next((most for size, most in _FLOAT32_BELOW if part.shape[-1] <= size), _OTHERWISE)
    return torch.float32 if queries < most else part.dtype
