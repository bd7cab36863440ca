#!/usr/bin/env bash
# Two hosts on one Linux machine: two network namespaces with an sshd in each, a hostfile, and DeepSpeed's launcher, which
# goes to both over ssh. Trains step 1 on the embedded task with ZeRO-3 on them, then on one host with two ranks, and ends
# with code 0 where the losses are the same to the last digit. No pytest run collects it: it needs root, `ip`, sshd and
# pdsh (on Debian and Ubuntu: apt-get install iproute2 openssh-server pdsh) and takes about two minutes.
#     sudo bash tests/two_hosts.sh
set -euo pipefail
export THREESTEP_VENV="${THREESTEP_VENV:-}"
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_setup.sh"

[ "$(id -u)" = 0 ] || threestep_fail "network namespaces are for root: run it with sudo"
for program in ip ssh ssh-keygen pdsh /usr/sbin/sshd; do
    command -v "$program" >/dev/null || threestep_fail "expected the program $program, found none"
done

WORK="$(mktemp -d)"
NAMES=("threestep$$a" "threestep$$b")
ADDRESSES=(10.213.7.1 10.213.7.2)

clean_up() {
    local name pid
    for name in "${NAMES[@]}"; do
        for pid in $(ip netns pids "$name" 2>/dev/null); do kill "$pid" 2>/dev/null || true; done
        ip netns delete "$name" 2>/dev/null || true
        rm -rf "/etc/netns/$name"
    done
    rm -rf "$WORK"
}
trap clean_up EXIT

# A cable between the two; each end is the interface `wire` of its host.
ip netns add "${NAMES[0]}"
ip netns add "${NAMES[1]}"
ip link add wire netns "${NAMES[0]}" type veth peer name wire netns "${NAMES[1]}"
for host in 0 1; do
    ip -n "${NAMES[$host]}" address add "${ADDRESSES[$host]}/24" dev wire
    ip -n "${NAMES[$host]}" link set wire up
    ip -n "${NAMES[$host]}" link set lo up
done
# What /etc holds on the two: names that are known, and no name server to wait for.
for name in "${NAMES[@]}"; do
    mkdir -p "/etc/netns/$name"
    printf '%s\n' "127.0.0.1 localhost" "${ADDRESSES[0]} host-1" "${ADDRESSES[1]} host-2" >"/etc/netns/$name/hosts"
    printf 'nameserver 127.0.0.1\noptions timeout:1 attempts:1\n' >"/etc/netns/$name/resolv.conf"
done

# ssh without a question: keys of this run alone, nothing of the user's is read or written.
ssh-keygen -q -t ed25519 -N "" -f "$WORK/key"
cat >"$WORK/sshd_config" <<CONFIG
HostKey $WORK/key
AuthorizedKeysFile $WORK/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
CONFIG
cat >"$WORK/ssh_config" <<CONFIG
Host *
    IdentityFile $WORK/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
CONFIG
mkdir -p /run/sshd "$WORK/programs"
printf '#!/bin/sh\nexec %s -F %s "$@"\n' "$(command -v ssh)" "$WORK/ssh_config" >"$WORK/programs/ssh"
chmod +x "$WORK/programs/ssh"
export PATH="$WORK/programs:$PATH"
for name in "${NAMES[@]}"; do
    ip netns exec "$name" /usr/sbin/sshd -D -e -f "$WORK/sshd_config" 2>>"$WORK/sshd.log" &
done

# What DeepSpeed's launcher is given: the hosts, and the variables that it hands on to their ranks.
printf '%s slots=1\n' "${ADDRESSES[@]}" >"$WORK/hosts"
cat >"$WORK/environment" <<VARIABLES
GLOO_SOCKET_IFNAME=wire
DS_ACCELERATOR=cpu
OMP_NUM_THREADS=1
VARIABLES
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH="$THREESTEP_ROOT${PYTHONPATH:+:$PYTHONPATH}"

cd "$WORK"
"$PYTHON" -m threestep new-model --data_path embedded --vocab_size 300 --hidden_size 64 --num_hidden_layers 2 --out model
flags=(--model_name_or_path model --data_path embedded --data_split 1,0,0 --max_train_rows 256 --max_eval_rows 64
    --max_seq_len 64 --per_device_train_batch_size 16 --num_train_epochs 1 --learning_rate 1e-3 --dtype fp32
    --zero_stage 3 --seed 1 --data_output_path "$WORK/cache")

threestep_say "one host, two ranks"
THREESTEP_RANKS=2 "$PYTHON" -m training.utils.run.launch training.step1_sft.main "${flags[@]}" --output_dir one_host

threestep_say "two hosts, one rank each"
DS_ENV_FILE="$WORK/environment" MASTER_ADDR="${ADDRESSES[0]}" THREESTEP_HOSTFILE="$WORK/hosts" THREESTEP_RANKS= \
    ip netns exec "${NAMES[0]}" "$PYTHON" -m training.utils.run.launch training.step1_sft.main "${flags[@]}" \
    --output_dir two_hosts

"$PYTHON" - <<'PYTHON'
import json
import sys

losses = {}
for run in ("one_host", "two_hosts"):
    with open(f"{run}/metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    losses[run] = [(name, row[name]) for row in rows for name in ("train/loss", "eval/loss") if name in row]
for one, two in zip(losses["one_host"], losses["two_hosts"]):
    print(f"{one[0]:12} one host {one[1]!r:22} two hosts {two[1]!r:22}")
same = losses["one_host"] == losses["two_hosts"] and len(losses["one_host"]) > 5
print("the losses are the same" if same else "THE LOSSES DIFFER")
sys.exit(0 if same else 1)
PYTHON
