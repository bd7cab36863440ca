"""Rollouts by vLLM servers: serves `--rollout_engine vllm_server`, with what runs in a server."""
