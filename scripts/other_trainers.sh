#!/usr/bin/env bash
# Environments of other trainers, one each, for the tests of tests/end_to_end/test_other_trainers.py and for comparisons.
#
#   bash scripts/other_trainers.sh FOLDER [NAME ...]     default: all of them
#
# Names: trl116 trl024 trl016 trl013 trl012 llamafactory axolotl verl (verl, OpenRLHF and AReaL in one: functions alone).
# One that is there is left as it is. Then:
#   THREESTEP_OTHER_TRAINERS=FOLDER python -m pytest --long tests/end_to_end/test_other_trainers.py
#
#   THREESTEP_PYTHON  the Python that makes them, 3.11 for the old releases; default: python3
#   THREESTEP_TORCH   a folder that has torch 2.13, to be found by all of them in place of a copy each
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
folder="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
[ $# -gt 0 ] || set -- trl116 trl024 trl016 trl013 trl012 llamafactory axolotl verl
old=(rich "numpy<2.3" "accelerate<1.4")

for name in "$@"; do
    case "$name" in
        trl116) wanted=(trl==1.16.0 peft) ;;
        trl024) wanted=(trl==0.24.0 "transformers==4.57.*") ;;
        trl016) wanted=(trl==0.16.0 transformers==4.50.3 rich) ;;
        trl013) wanted=(trl==0.13.0 transformers==4.47.1 "${old[@]}") ;;
        trl012) wanted=(trl==0.12.0 transformers==4.46.0 "${old[@]}") ;;
        llamafactory) wanted=(llamafactory==0.9.5) ;;
        axolotl) wanted=(axolotl==0.19.0) ;;
        # Their pins exclude each other: they are installed without them, and only their functions are called.
        verl) wanted=("ray[default]==2.55.0" tensordict==0.10.0 transformers==5.10.4 deepspeed==0.19.6 codetiming
            hydra-core torchdata loralib optimum optree pylatexenc colorlog aiofiles uvloop tenacity pillow) ;;
        *) printf 'error: NAME expects one of those listed, got %s; run it without arguments for the list\n' "$name" >&2
           exit 2 ;;
    esac
    venv="$folder/$name"
    [ -f "$venv/ready" ] && continue
    printf '%s ...\n' "$name"
    [ -x "$venv/bin/python" ] || "${THREESTEP_PYTHON:-python3}" -m venv "$venv"
    if [ -n "${THREESTEP_TORCH:-}" ]; then
        site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        printf '%s\n' "$THREESTEP_TORCH" >"$site/torch_elsewhere.pth"
    fi
    pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" torch==2.13.0 "${wanted[@]}"
    [ "$name" != verl ] || "${pip[@]}" --no-deps verl==0.9.1 openrlhf==0.11.2 areal==1.0.4
    # Builds that do not fit this torch break the imports of LLaMA-Factory, which trains on text without them.
    [ "$name" != llamafactory ] || "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio
    touch "$venv/ready"
done
printf 'THREESTEP_OTHER_TRAINERS=%s python -m pytest --long tests/end_to_end/test_other_trainers.py\n' "$folder"
