"""Words shared by the trainer and what runs in a server. PROTOCOL changes with what they say to each other."""

from __future__ import annotations

PROTOCOL = 2
BACKEND = "threestep"
KEY_VARIABLE = "VLLM_API_KEY"
KEY_FILE_VARIABLE = "VLLM_API_KEY_FILE"
