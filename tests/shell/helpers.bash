# shellcheck shell=bash disable=SC2016 # the stand-ins' own variables
# A checkout with the scripts alone, and a python3.11 first on PATH that records its calls and installs nothing.

REPO_ROOT="$(cd -- "${BATS_TEST_DIRNAME}/../.." && pwd)"

make_checkout() {
  CHECKOUT="${BATS_TEST_TMPDIR}/checkout"
  mkdir -p "${CHECKOUT}/cluster" "${BATS_TEST_TMPDIR}/bin"
  cp -r "${REPO_ROOT}/requirements" "${CHECKOUT}/requirements"
  cp -r "${REPO_ROOT}/cluster/lib" "${CHECKOUT}/cluster/lib"
  cp "${REPO_ROOT}/pyproject.toml" "${REPO_ROOT}/run_mixed_training.sh" "${REPO_ROOT}/run_tests.sh" "${CHECKOUT}"
  export CALLS="${BATS_TEST_TMPDIR}/calls"
  : >"${CALLS}"
  cat >"${BATS_TEST_TMPDIR}/bin/python3.11" <<'FAKE'
#!/usr/bin/env bash
echo "python $*" >>"${CALLS}"
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/verl-mixed"
    sed -i 's/"python \$\*"/"verl-mixed $* PROFILE=${PROFILE} TACO_RATIO=${TACO_RATIO}"/' "$3/bin/verl-mixed"
    ;;
  "-m pip") exit "${PIP_EXIT:-0}" ;;
esac
exit 0
FAKE
  chmod +x "${BATS_TEST_TMPDIR}/bin/python3.11"
  export PATH="${BATS_TEST_TMPDIR}/bin:${PATH}"
  unset PYTHON PROFILE TACO_RATIO CONDA_ENV CONDA_PATH VENV MASTER_IP HOSTS_FILE ON_HEAD DRY_RUN TORCH_INDEX_URL \
    OVERRIDES RAY_ADDRESS NNODES
  export HOME="${BATS_TEST_TMPDIR}/home"
  mkdir -p "${HOME}"
}

# calls WORD: how many recorded calls hold this word.
calls() { grep -c -- "$1" "${CALLS}" || true; }

# fake_venv: a venv that these scripts did not make; its python answers `verl_mixed.commands.facts` with the file FACTS.
fake_venv() {
  mkdir -p "${BATS_TEST_TMPDIR}/venv/bin"
  cat >"${BATS_TEST_TMPDIR}/venv/bin/python" <<'FAKE'
#!/usr/bin/env bash
echo "python $*" >>"${CALLS}"
[[ "$2" != verl_mixed.checks.packages ]] || exit "${ENVIRONMENT_EXIT:-0}"
cat "${FACTS}"
FAKE
  cat >"${BATS_TEST_TMPDIR}/venv/bin/verl-mixed" <<'FAKE'
#!/usr/bin/env bash
{ printf 'verl-mixed'; printf ' <%s>' "$@"; echo " PROFILE=${PROFILE}"; } >>"${CALLS}"
FAKE
  chmod +x "${BATS_TEST_TMPDIR}/venv/bin/"*
}

# make_cluster: a checkout whose head is 192.0.2.1. A fake ssh records its arguments and what it is sent, and runs the
# far command here, with the head's home; tmux is the real one on a socket of this test. What `verl_mixed.commands.facts` says is
# the file FACTS.
make_cluster() {
  make_checkout
  export HEAD_HOME="${BATS_TEST_TMPDIR}/head" TMUX_TMPDIR="${BATS_TEST_TMPDIR}"
  export FACTS="${BATS_TEST_TMPDIR}/facts" SENT="${BATS_TEST_TMPDIR}/sent" MASTER_IP=192.0.2.1
  mkdir -p "${HEAD_HOME}/python"
  unset TMUX WORKER_NODES VENV RAY_PORT RAY_TEMP_DIR WANDB_DIR WANDB_API_KEY EXPERIMENT_NAME
  cp "${REPO_ROOT}/cluster/inventory.py" "${CHECKOUT}/cluster/"
  touch "${CHECKOUT}/cluster/__init__.py"
  mkdir -p "${CHECKOUT}/config"
  cp "${REPO_ROOT}/config/"{__init__,child,environment,text_table}.py "${CHECKOUT}/config"
  facts ""
  cat >"${BATS_TEST_TMPDIR}/bin/ssh" <<'FAKE'
#!/usr/bin/env bash
[[ "$*" != *"-O exit"* ]] || exit 0
echo "ssh$(printf ' <%s>' "$@")" >>"${CALLS}" # in one piece: others write beside it
[[ -z "${SSH_EXIT:-}" ]] || exit "${SSH_EXIT}"
export HOME="${HEAD_HOME}"
[[ "$1" != -n ]] || exec bash -c "${*: -1}" </dev/null
[[ "$1" != -t ]] || exec bash -c "${*: -1}"
tee -a "${SENT}" | bash -c "${*: -1}"
exit "${PIPESTATUS[1]}"
FAKE
  printf '#!/usr/bin/env bash\necho "setup_cluster $* MASTER_IP=${MASTER_IP} %s" >>"${CALLS}"\n%s\n' \
    'HOSTS_FILE=${HOSTS_FILE:-} CONDA_ENV=${CONDA_ENV:-}' '[[ "$1" != "${SETUP_FAILS:-}" ]]' >"${CHECKOUT}/setup_cluster.sh"
  cat >"${HEAD_HOME}/python/python" <<'FAKE'
#!/usr/bin/env bash
echo "python$(printf ' <%s>' "$@")" >>"${CALLS}"
cat "${FACTS}"
FAKE
  cat >"${HEAD_HOME}/python/verl-mixed" <<'FAKE'
#!/usr/bin/env bash
{ printf 'verl-mixed'; printf ' <%s>' "$@"; echo " MASTER_IP=${MASTER_IP:-} RAY_PORT=${RAY_PORT:-}" \
  "TACO_RATIO=${TACO_RATIO:-} KEY=${WANDB_API_KEY:-} WANDB_DIR=${WANDB_DIR:-} FILES=${TRAIN_FILES:-}"; } >>"${CALLS}"
[[ "$1" != train ]] || {
  [[ -z "${TRAIN_EXIT:-}" ]] || { echo "boom: the last words"; exit "${TRAIN_EXIT}"; }
  mkdir -p runs/demo
  echo step >>runs/demo/train.log
  exec sleep 300
}
[[ "$1" != "${VERL_MIXED_FAILS:-}" ]]
FAKE
  mkdir -p "${HEAD_HOME}/.verl_mixed/192.0.2.1"
  echo "export PATH=\"${HEAD_HOME}/python:\${PATH}\" RAY_ADDRESS=10.9.9.9:7000 WANDB_DIR=/of/setup" \
    >"${HEAD_HOME}/.verl_mixed/192.0.2.1/env"
  chmod +x "${BATS_TEST_TMPDIR}/bin/ssh" "${CHECKOUT}/setup_cluster.sh" "${HEAD_HOME}/python/"*
}

# facts [NAME=VALUE ...]: what the run is said to be; the default is one that was never started.
facts() {
  printf '%s\n' RUN_FOLDER=runs/demo "RUN_HOLDER=''" RUN_STEP=0 RUN_TOTAL=16 RUN_CHECKPOINT=0 RUN_DONE=0 "$@" >"${FACTS}"
}

end_tmux() { tmux kill-server 2>/dev/null || true; }

# record HEAD [WORKER ...]: the record that `setup_cluster.sh setup` leaves in the checkout.
record() {
  local folder="${CHECKOUT}/.cluster/$1"
  mkdir -p "${folder}"
  printf '[head]\n%s ip=%s\n' "$1" "$1" >"${folder}/hosts"
  (($# == 1)) || printf '\n[workers]\n' >>"${folder}/hosts"
  (($# == 1)) || printf '%s\n' "${@:2}" >>"${folder}/hosts"
  printf "RAY_PORT=7000\nRAY_AUTH_MODE=token\n" >"${folder}/settings.env"
}

# set_up_home ID HEAD_IP FOLDER: lines of the file `env` that setup leaves in the home folder of a node.
set_up_home() {
  mkdir -p "${HOME}/.verl_mixed/$3"
  printf 'export VERL_MIXED_CLUSTER=%s VERL_MIXED_NODE=%s/x\nexport MASTER_IP=%s RAY_PORT=6379\n' "$1" "$1" "$2" \
    >>"${HOME}/.verl_mixed/$3/env"
}

# set_in SCRIPT ASSIGNMENT...: lines in the settings block of a script of the checkout, in the place of their variables.
set_in() {
  local script="${CHECKOUT}/$1" line
  for line in "${@:2}"; do
    if grep -q "^  ${line%%=*}=" "${script}"; then
      sed -i "s|^  ${line%%=*}=.*|  ${line}|" "${script}"
    else
      sed -i "0,/^{/s|^{|{\n  ${line}|" "${script}"
    fi
  done
}
