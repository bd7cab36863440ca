"""Words shared by the trainer and what runs in a server. PROTOCOL changes with what they say to each other."""

from __future__ import annotations

PROTOCOL = 3
BACKEND = "threestep"
TCP, GLOO, NCCL = "tcp", "gloo", "nccl"  # by which weights go
# Requests whose experts are recorded have names that begin so; vLLM puts its own word before them (0.32,
# token_in_token_out/serving.py).
EXPERTS_OF = "experts-"
NAMED_BY_VLLM = "generate-tokens-"
KEY_VARIABLE = "VLLM_API_KEY"
KEY_FILE_VARIABLE = "VLLM_API_KEY_FILE"
