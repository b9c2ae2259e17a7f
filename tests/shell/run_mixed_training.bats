#!/usr/bin/env bats
# run_mixed_training.sh and the environment it makes.
bats_require_minimum_version 1.5.0

setup() {
  load helpers
  make_checkout
}

@test "--help prints the header and installs nothing" {
  run "${CHECKOUT}/run_mixed_training.sh" --help
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"Usage: run_mixed_training.sh"* ]]
  [[ "${output}" != *"set -euo"* ]]
  [ ! -s "${CALLS}" ]
}

@test "an unknown option is exit 2 and installs nothing" {
  run "${CHECKOUT}/run_mixed_training.sh" --nonsense
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"unknown option --nonsense"* ]]
  [ ! -s "${CALLS}" ]
}

@test "a word that is no override is exit 2" {
  run "${CHECKOUT}/run_mixed_training.sh" laptop
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"KEY=VALUE"* ]]
}

@test "the first start installs torch, then the lock, then the checkout, then trains" {
  run "${CHECKOUT}/run_mixed_training.sh" mixed.seed=3
  [ "${status}" -eq 0 ]
  run grep -E -- "install|verl-mixed" "${CALLS}"
  [[ "${lines[0]}" == *"torch.txt" && "${lines[0]}" == *"--constraint"*"laptop.lock"* ]]
  [[ "${lines[1]}" == *"-r"*"laptop.lock"* ]]
  [[ "${lines[2]}" == *"--no-deps --no-build-isolation"*"--editable"* ]]
  [[ "${lines[3]}" == "verl-mixed train mixed.seed=3"* ]]
  [ "${#lines[@]}" -eq 4 ]
}

@test "settings reach the run, the environment before the block" {
  TACO_RATIO=0.7 run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  grep -q "verl-mixed train PROFILE=laptop TACO_RATIO=0.7" "${CALLS}"
}

@test "a second start asks pip nothing" {
  "${CHECKOUT}/run_mixed_training.sh"
  : >"${CALLS}"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ "$(calls pip)" -eq 0 ]
  [ "$(calls 'verl-mixed train')" -eq 1 ]
}

@test "a failed install fails the start, and the next one begins with a fresh venv" {
  PIP_EXIT=1 run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"not complete"* ]]
  [ "$(calls verl-mixed)" -eq 0 ]
  touch "${CHECKOUT}/.venv/half_made"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ ! -e "${CHECKOUT}/.venv/half_made" ]
}

@test "a changed lock updates the venv in place" {
  "${CHECKOUT}/run_mixed_training.sh"
  touch "${CHECKOUT}/.venv/kept"
  : >"${CALLS}"
  echo "six==1.17.0" >>"${CHECKOUT}/requirements/laptop.lock"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ "$(calls '-m venv')" -eq 0 ]
  [ "$(calls laptop.lock)" -ge 1 ]
  [ -e "${CHECKOUT}/.venv/kept" ]
}

@test "a machine with a GPU gets the versions of gpu.lock, whatever the profile" {
  printf '#!/bin/sh\necho GPU 0\n' >"${BATS_TEST_TMPDIR}/bin/nvidia-smi"
  chmod +x "${BATS_TEST_TMPDIR}/bin/nvidia-smi"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ "$(calls 'gpu.lock')" -eq 1 ]
  [ "$(calls 'laptop.lock')" -eq 0 ]
  [ "$(calls 'torch.txt')" -eq 0 ]
  : >"${CALLS}"
  PROFILE=laptop run "${CHECKOUT}/run_mixed_training.sh"
  [ "$(calls '-m pip')" -eq 0 ]
}

@test "a venv of somebody else is moved aside, not deleted" {
  mkdir -p "${CHECKOUT}/.venv"
  touch "${CHECKOUT}/.venv/precious"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  compgen -G "${CHECKOUT}/.venv.old.*/precious"
}

@test "two starts at once install once" {
  "${CHECKOUT}/run_mixed_training.sh" &
  "${CHECKOUT}/run_mixed_training.sh"
  wait
  [ "$(calls '-m venv')" -eq 1 ]
  [ "$(calls 'verl-mixed train')" -eq 2 ]
}

@test "no Python of the right version is exit 1 and says which" {
  printf '#!/bin/sh\nexit 1\n' >"${BATS_TEST_TMPDIR}/bin/python3.11"
  for name in python3.12 python3.10 python3 python; do
    cp "${BATS_TEST_TMPDIR}/bin/python3.11" "${BATS_TEST_TMPDIR}/bin/${name}"
  done
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no Python 3.10 to 3.12"* ]]
}

@test "CONDA_ENV without conda is exit 2 and names the file" {
  CONDA_ENV=rl CONDA_PATH="${BATS_TEST_TMPDIR}/conda" run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"conda/etc/profile.d/conda.sh"* ]]
}

@test "CONDA_ENV is activated and checked, and nothing is installed; CONDA_PATH is a folder or its activation script" {
  mkdir -p "${BATS_TEST_TMPDIR}/conda/etc/profile.d"
  for name in python verl-mixed; do
    printf '#!/bin/sh\necho "%s $*" >>"${CALLS}"\n' "${name}" >"${BATS_TEST_TMPDIR}/bin/${name}"
    chmod +x "${BATS_TEST_TMPDIR}/bin/${name}"
  done
  echo 'conda() { echo "conda $*" >>"${CALLS}"; }' >"${BATS_TEST_TMPDIR}/conda/etc/profile.d/conda.sh"
  for path in conda conda/bin/activate conda/etc/profile.d/conda.sh; do
    : >"${CALLS}"
    CONDA_ENV=rl CONDA_PATH="${BATS_TEST_TMPDIR}/${path}" run "${CHECKOUT}/run_mixed_training.sh"
    [ "${status}" -eq 0 ]
    [ "$(cat "${CALLS}")" = "conda activate rl
python -m verl_mixed.checks.packages
verl-mixed train" ]
  done
  [ ! -e "${CHECKOUT}/.venv" ]
}

@test "start is the default and may be written" {
  run "${CHECKOUT}/run_mixed_training.sh" start mixed.seed=3
  [ "${status}" -eq 0 ]
  grep -q "verl-mixed train mixed.seed=3" "${CALLS}"
}

@test "VENV is used and checked, and nothing is installed" {
  fake_venv
  VENV="${BATS_TEST_TMPDIR}/venv" run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  grep -qx "python -m verl_mixed.checks.packages" "${CALLS}"
  grep -q "^verl-mixed <train>" "${CALLS}"
  [ ! -e "${CHECKOUT}/.venv" ]
}

@test "a VENV that is incomplete, or not there, is exit 2 and is named" {
  fake_venv
  ENVIRONMENT_EXIT=1 VENV="${BATS_TEST_TMPDIR}/venv" run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"VENV=${BATS_TEST_TMPDIR}/venv is not complete"* ]]
  VENV=/nowhere run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"no /nowhere/bin/python"* ]]
}

@test "VENV that names .venv is made as ever" {
  VENV="${CHECKOUT}/.venv" run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ -s "${CHECKOUT}/.venv/.stamp" ]
}

@test "what only looks installs nothing, and says what is missing" {
  for command in status logs stop; do
    run "${CHECKOUT}/run_mixed_training.sh" "${command}"
    [ "${status}" -eq 2 ]
    [[ "${output}" == *"no Python environment in ${CHECKOUT}/.venv"*"start' installs it"* ]]
  done
  run "${CHECKOUT}/run_mixed_training.sh" dry-run mixed.seed=3
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"not installed yet"*"+ verl-mixed train mixed.seed=3"* ]]
  [ ! -s "${CALLS}" ]
  [ ! -e "${CHECKOUT}/.venv" ]
}

@test "here: status, logs, stop, resume, validate and dry-run of a run that was stopped" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv" FACTS="${BATS_TEST_TMPDIR}/facts"
  mkdir -p "${CHECKOUT}/runs/demo"
  touch "${CHECKOUT}/runs/demo/config.yaml"
  echo "a line" >"${CHECKOUT}/runs/demo/train.log"
  facts RUN_STEP=7 RUN_CHECKPOINT=5

  run "${CHECKOUT}/run_mixed_training.sh" status
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"goes on from global_step_5"* ]]
  run "${CHECKOUT}/run_mixed_training.sh" logs
  [ "${lines[-1]}" = "a line" ]
  run "${CHECKOUT}/run_mixed_training.sh" stop
  [ "${status}" -eq 0 ]
  run "${CHECKOUT}/run_mixed_training.sh" resume
  [[ "${output}" == *"resuming runs/demo from global_step_5"* ]]
  run "${CHECKOUT}/run_mixed_training.sh" validate
  [ "${status}" -eq 0 ]
  [ "$(calls '<train>')" -eq 1 ]
  run "${CHECKOUT}/run_mixed_training.sh" start --dry-run
  [[ "${output}" == *"+ verl-mixed train"* ]]
  [ "$(calls '<train>')" -eq 1 ]
  for words in "<watch> <runs/demo>" "<stop> <runs/demo>" "<check>" "<doctor>"; do
    grep -q "verl-mixed ${words}" "${CALLS}"
  done
}

@test "resume where nothing was saved, and of a run that goes on, is exit 2" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv" FACTS="${BATS_TEST_TMPDIR}/facts"
  facts ""
  run "${CHECKOUT}/run_mixed_training.sh" resume
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"nothing to resume: runs/demo"*"start' begins it"* ]]
  facts "RUN_HOLDER='process 9 on here'" RUN_CHECKPOINT=5
  run "${CHECKOUT}/run_mixed_training.sh" resume
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"it is running (process 9 on here"* ]]
}

@test "attach without a session is exit 1 and says what to do instead" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv" FACTS="${BATS_TEST_TMPDIR}/facts" TMUX_TMPDIR="${BATS_TEST_TMPDIR}"
  facts ""
  run "${CHECKOUT}/run_mixed_training.sh" attach
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"logs -f"* ]]
}

@test "a GPU chooses the profile gpu where there is one, and says so where there is none" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv"
  printf '#!/bin/sh\necho GPU 0\n' >"${BATS_TEST_TMPDIR}/bin/nvidia-smi"
  chmod +x "${BATS_TEST_TMPDIR}/bin/nvidia-smi"
  run "${CHECKOUT}/run_mixed_training.sh"
  [[ "${output}" == *"no config/profile/gpu.yaml"* ]]
  grep -q "<train> PROFILE=laptop" "${CALLS}"
  mkdir -p "${CHECKOUT}/config/profile"
  touch "${CHECKOUT}/config/profile/gpu.yaml"
  run "${CHECKOUT}/run_mixed_training.sh"
  grep -q "<train> PROFILE=gpu" "${CALLS}"
  PROFILE=laptop run "${CHECKOUT}/run_mixed_training.sh"
  [ "$(calls '<train> PROFILE=laptop')" -eq 2 ]
  PROFILE=gpu_async run "${CHECKOUT}/run_mixed_training.sh"
  [ "$(calls '<train> PROFILE=gpu_async')" -eq 1 ]
}

@test "options in the wrong place are exit 2" {
  for words in "status -f" "start --grace 5" "stop --dry-run" "start stop" "--hosts"; do
    # shellcheck disable=SC2086 # words
    run "${CHECKOUT}/run_mixed_training.sh" ${words}
    [ "${status}" -eq 2 ]
  done
  [ ! -s "${CALLS}" ]
}

@test "OVERRIDES of the block come before those of the command line, which win" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv"
  set_in run_mixed_training.sh "OVERRIDES=(mixed.seed=1 'a=[x, y]' +profile=gpu ~b)"
  run "${CHECKOUT}/run_mixed_training.sh"
  grep -qF "<train> <mixed.seed=1> <a=[x, y]> <+profile=gpu> <~b> PROFILE" "${CALLS}"
  run "${CHECKOUT}/run_mixed_training.sh" ++mixed.seed=2 profile=laptop
  grep -qF "<train> <a=[x, y]> <~b> <++mixed.seed=2> <profile=laptop> PROFILE" "${CALLS}"
  OVERRIDES="c='x y' d=1" run "${CHECKOUT}/run_mixed_training.sh"
  grep -qF "<train> <c=x y> <d=1> PROFILE" "${CALLS}"
  for words in "'a=1" "a"; do
    OVERRIDES="${words}" run "${CHECKOUT}/run_mixed_training.sh"
    [ "${status}" -eq 2 ]
    [[ "${output}" == *OVERRIDES* ]]
  done
}

@test "a variable of the block that no one reads is exit 2, with what to write instead" {
  export PROFILE=laptop
  for words in "LEARNIG_RATE=1e-6|the nearest is LEARNING_RATE" "GPUS_PER_NODE=4|the nearest is N_GPUS_PER_NODE" \
    "WANDB_API_KEY=s|export WANDB_API_KEY=..." "NUM_CPUS=8|a setting of setup_cluster.sh" \
    "kl_coef=0.001|the nearest is KL_COEF" "ZZZ=(1)|no such setting; a key of Hydra belongs in OVERRIDES"; do
    make_checkout
    cp "${REPO_ROOT}/setup_cluster.sh" "${CHECKOUT}"
    set_in run_mixed_training.sh "${words%%|*}"
    run "${CHECKOUT}/run_mixed_training.sh"
    [ "${status}" -eq 2 ]
    [[ "${output}" == *"error: ${words%%=*} in the settings block of run_mixed_training.sh: "*"${words#*|}"* ]]
    [ ! -s "${CALLS}" ]
  done
}

@test "what the block uses itself, lines of an array, exports and variables of the scripts are no mistake" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv"
  set_in run_mixed_training.sh 'DATA=/data; TRAIN_FILES=("${DATA}/a.parquet")' "export NCCL_DEBUG=INFO" LOG_LINES=5 \
    'OVERRIDES=( # of "all"\n    profile=laptop\n    mixed.seed=1\n  )'
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  grep -q "<train> <profile=laptop> <mixed.seed=1>" "${CALLS}"
}

@test "the names of the block reach the run" {
  fake_venv
  export VENV="${BATS_TEST_TMPDIR}/venv"
  sed -i 's/ PROFILE=${PROFILE}"/ $NNODES $N_GPUS_PER_NODE $MAX_RESPONSE_LENGTH $KL_COEF"/' "${VENV}/bin/verl-mixed"
  set_in run_mixed_training.sh NNODES=1 N_GPUS_PER_NODE=4 MAX_RESPONSE_LENGTH=512 KL_COEF=0.01
  run "${CHECKOUT}/run_mixed_training.sh"
  grep -q "<train> 1 4 512 0.01" "${CALLS}"
}

# --- which machine, without MASTER_IP; tests/shell/run_on_cluster.bats has those that go to a cluster

@test "several clusters that were set up are exit 2 and are named; MASTER_IP=local is this machine" {
  record 10.0.0.1
  record 10.0.0.9
  for command in start status logs stop dry-run validate attach resume; do
    run "${CHECKOUT}/run_mixed_training.sh" "${command}"
    [ "${status}" -eq 2 ]
    [[ "${output}" == *"several clusters were set up (10.0.0.1 10.0.0.9)"*"MASTER_IP=local"* ]]
  done
  [ ! -s "${CALLS}" ]
  MASTER_IP=local run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  set_in run_mixed_training.sh "MASTER_IP=local" "WORKER_NODES=(10.0.0.2)" "HOSTS_FILE=/no/hosts"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ "$(calls 'verl-mixed train')" -eq 2 ]
}

@test "RAY_ADDRESS is a Ray for a run on this machine, whatever was set up" {
  record 10.0.0.1
  RAY_ADDRESS=auto run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 0 ]
  [ "$(calls 'verl-mixed train')" -eq 1 ]
}

@test "a head in the block of setup_cluster.sh that is not set up is exit 2, and nothing trains here" {
  cp "${REPO_ROOT}/setup_cluster.sh" "${CHECKOUT}"
  set_in setup_cluster.sh MASTER_IP=10.0.0.1
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"names the head 10.0.0.1, whose cluster is not set up"*"'./setup_cluster.sh setup' first"* ]]
  record 10.0.0.9
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"head 10.0.0.1, "*"MASTER_IP=10.0.0.9 runs on that cluster"*"MASTER_IP=local"* ]]
  printf '# ours\n[head]\n# first\n10.0.0.7 num_gpus=8\n[workers]\n10.0.0.8\n' >"${BATS_TEST_TMPDIR}/hosts"
  set_in setup_cluster.sh 'MASTER_IP=""' "HOSTS_FILE=${BATS_TEST_TMPDIR}/hosts"
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"names the head 10.0.0.7, "* ]]
  [ ! -s "${CALLS}" ]
}

@test "a node of a cluster that was set up from elsewhere does not train by itself" {
  set_up_home 192.0.2.1 192.0.2.1 192.0.2.1.192.0.2.2
  run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"(192.0.2.1, whose head is 192.0.2.1)"*"its jumphost or its head"*"MASTER_IP=local"* ]]
  [ ! -s "${CALLS}" ]
}

@test "MASTER_IP=local and a hosts file contradict each other: exit 2" {
  touch "${BATS_TEST_TMPDIR}/hosts"
  MASTER_IP=local run "${CHECKOUT}/run_mixed_training.sh" --hosts "${BATS_TEST_TMPDIR}/hosts"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"MASTER_IP=local is this machine"* ]]
}

@test "--retries and RETRIES want a whole number, before anything is done" {
  for words in "start --retries" "start --retries two" "stop --retries 1"; do
    # shellcheck disable=SC2086 # words
    run "${CHECKOUT}/run_mixed_training.sh" ${words}
    [ "${status}" -eq 2 ]
  done
  RETRIES=-1 run "${CHECKOUT}/run_mixed_training.sh"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"RETRIES=-1: want a whole number"* ]]
  [ ! -s "${CALLS}" ]
}

@test "a setting of a cluster's hosts is refused for a run on this machine" {
  for setting in CONTAINER_IMAGE=mixed:1 HOST_ENV=A=1 RAY_WORKER_PORTS=20000-20999; do
    run env "${setting}" "${CHECKOUT}/run_mixed_training.sh"
    [ "${status}" -eq 2 ]
    [[ "${output}" == *"${setting%%=*} is for the hosts of a cluster, and this run is on this machine"* ]]
  done
  [ ! -s "${CALLS}" ]
}
