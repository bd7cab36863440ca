#!/usr/bin/env bash
# Starts a vLLM server for the rollouts of training (--rollout_engine vllm_server), on a GPU where there is one, else on
# the CPU, in the environment of scripts/test_vllm.sh. See threestep/plugins/vllm/servers.md.
#
#     VLLM_API_KEY_FILE=key bash scripts/serve.sh MODEL [--host ADDRESS] [--port PORT] [flags of vLLM]
#
#   MODEL              folder or hub name of the model that training starts from; its weights are replaced
#   VLLM_API_KEY       the key that every request must have; or
#   VLLM_API_KEY_FILE  the file that holds it, which is made where it is missing. Give training the same.
#
# It listens on 127.0.0.1, port 8000. The traffic is not encrypted: give --host only an address of a private network.
set -euo pipefail
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if ! nvidia-smi >/dev/null 2>&1; then
    THREESTEP_VENV="${THREESTEP_VENV:-${THREESTEP_VLLM_VENV:-$scripts/../.venv_vllm}}"
fi
case "${1:-}" in
"" | -*)
    printf 'error: expected a model: bash scripts/serve.sh MODEL [--host ADDRESS] [--port PORT] [flags of vLLM]\n' >&2
    exit 2
    ;;
esac
model="$1"
shift
before=""
for word in "$@"; do
    case "$before=$word" in
    --host= | *=--host=)
        printf 'error: --host expects an address, got none: vLLM would listen on all of this machine\n' >&2
        exit 2
        ;;
    esac
    before="$word"
done
if [ -z "${VLLM_API_KEY:-}" ]; then
    [ -n "${VLLM_API_KEY_FILE:-}" ] || {
        printf 'error: expected a key in VLLM_API_KEY, or a file for it in VLLM_API_KEY_FILE: whoever reaches a server without one can change its weights\n' >&2
        exit 2
    }
    if [ ! -s "$VLLM_API_KEY_FILE" ]; then
        (umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$VLLM_API_KEY_FILE")
    fi
    VLLM_API_KEY="$(cat "$VLLM_API_KEY_FILE")"
fi
export VLLM_API_KEY
source "$scripts/_setup.sh"
export PYTHONPATH="$THREESTEP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
# VLLM_SERVER_DEV_MODE opens the addresses that change weights; the guard below asks for the key on all of them.
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_V2_MODEL_RUNNER=0
words=(--model "$model" --host 127.0.0.1 --port 8000 --generation-config vllm --enable-scale-out
    --worker-extension-cls threestep.plugins.vllm.servers.worker.ThreestepWorker
    --weight-transfer-config '{"backend": "threestep"}'
    --middleware threestep.plugins.vllm.servers.guard.KeyGuard --disable-uvicorn-access-log)
if ! nvidia-smi >/dev/null 2>&1; then
    # A prompt in parts and seeds do not go together on a CPU, and blocks of 128 tokens share few prompts (vLLM 0.32).
    export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}"
    words+=(--enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 8192 --block-size 32)
fi
# `vllm serve` without the command `vllm`, which fails where the package is called vllm-cpu (0.32).
exec "$PYTHON" -m vllm.entrypoints.openai.api_server "${words[@]}" "$@"
