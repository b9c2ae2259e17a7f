#!/usr/bin/env bats
# cluster/slurm: srun, scontrol, ray and the launcher are stand-ins; srun starts the command here, as the named node.
# VERL_MIXED_REAL_RAY=1 adds the last test: Ray itself on two addresses of this machine (a minute, 2 GB).
# bats file_tags=slow
bats_require_minimum_version 1.8.0

setup() {
  load helpers
  make_checkout
  cp -r "${REPO_ROOT}/cluster/slurm" "${CHECKOUT}/cluster/slurm"
  export SLURM_JOB_ID=4242 SLURM_JOB_NODELIST='gpu[1-3]' SLURM_SUBMIT_DIR="${CHECKOUT}" VENV="${BATS_TEST_TMPDIR}/venv"
  export ALIVE="${BATS_TEST_TMPDIR}/alive" NODE_NAMES="gpu1 gpu2 gpu3" TEMP_DIRS="${BATS_TEST_TMPDIR}/ray"
  export -n REPO_ROOT
  unset RAY_TEMP_DIR RAY_PORT MASTER_IP WORKER_NODES RAY_AUTH_MODE NODE_IP
  mkdir -p "${VENV}/bin" "${ALIVE}"
  PYTHON3="$(command -v python3)"
  export PYTHON3
  cat >"${BATS_TEST_TMPDIR}/bin/scontrol" <<'FAKE'
#!/usr/bin/env bash
echo "scontrol $*" >>"${CALLS}"
printf '%s\n' ${NODE_NAMES}
FAKE
  cat >"${BATS_TEST_TMPDIR}/bin/srun" <<'FAKE'
#!/usr/bin/env bash
echo "srun$(printf ' <%s>' "$@")" >>"${CALLS}" # in one piece: others write beside it
while [[ "$1" == --* ]]; do
  [[ "$1" != --nodelist=* ]] || node="${1#*=}"
  shift
done
export SLURMD_NODENAME="${node}" NODE_IP="127.0.0.${node#gpu}" RAY_TEMP_DIR="${TEMP_DIRS}-${node}"
exec "$@"
FAKE
  cat >"${VENV}/bin/python" <<'FAKE'
#!/usr/bin/env bash
case "$1 $2" in
  "-m cluster.ray_nodes")
    echo "ask ${RAY_ADDRESS} token=$(cat "${RAY_AUTH_TOKEN_PATH:-/dev/null}")" >>"${CALLS}"
    end=$((SECONDS + $4))
    for name in "${@:5}"; do
      until [[ -e "${ALIVE}/${name}" ]]; do
        ((SECONDS < end)) || exit 1
        sleep 0.1
      done
      echo "{\"joined\": \"${name}\"}"
    done
    ;;
  "-m verl_mixed.checks.packages") ;;
  *"/config/child.py verl_mixed.commands.facts") printf '%s\n' RUN_FOLDER=runs/demo "RUN_HOLDER=''" RUN_STEP=0 RUN_TOTAL=16 RUN_CHECKPOINT=0 RUN_DONE=0 ;;
  *) exec "${PYTHON3}" "$@" ;;
esac
FAKE
  cat >"${VENV}/bin/ray" <<'FAKE'
#!/usr/bin/env bash
echo "ray$(printf ' <%s>' "$@") mode=${RAY_AUTH_MODE}" >>"${CALLS}"
[[ "${SLURMD_NODENAME}" != "${NEVER_JOINS:-}" ]] || exec sleep 300
[[ "${SLURMD_NODENAME}" != "${DIES:-}" ]] || { echo "no space left"; exit 7; }
echo "$$" >"${ALIVE}/${SLURMD_NODENAME}"
trap 'rm "${ALIVE}/${SLURMD_NODENAME}"; kill "${nap}"; exit 0' TERM
sleep 300 & nap=$!
wait
FAKE
  cat >"${VENV}/bin/verl-mixed" <<'FAKE'
#!/usr/bin/env bash
{ printf 'verl-mixed'; printf ' <%s>' "$@"
  echo " on=${SLURMD_NODENAME} MASTER_IP=${MASTER_IP} PORT=${RAY_PORT} WORKERS=${WORKER_NODES} RATIO=${TACO_RATIO:-}"; } >>"${CALLS}"
case "$1" in
  stop)
    [[ -z "${SAVES:-}" ]] || { mkdir -p runs/demo/checkpoints && touch runs/demo/checkpoints/latest_checkpointed_iteration.txt; }
    touch "${ALIVE}.stop"
    ;;
  train)
    ls "${ALIVE}" | paste -sd' ' >>"${CALLS}"
    [[ -z "${KILLS:-}" || -n "${VERL_MIXED_KILLED:-}" ]] || kill -9 "$$"
    [[ -z "${WAITS:-}" ]] || { trap 'exit 130' TERM; until [[ -e "${ALIVE}.stop" ]]; do sleep 0.1; done; }
    exit "${TRAIN_EXIT:-0}"
    ;;
esac
FAKE
  chmod +x "${BATS_TEST_TMPDIR}/bin/"* "${VENV}/bin/"*
}

job() { run timeout 60 "${CHECKOUT}/cluster/slurm/mixed_training.sbatch" "$@"; }

# clean: no Ray, no temporary folder and no token is left.
clean() {
  [ -z "$(ls -A "${ALIVE}")" ] || return 1
  run ! compgen -G "${TEMP_DIRS}-*"
  [ ! -e "${CHECKOUT}/runs/.slurm/4242/token" ]
}

# until_called WORD: wait for the recorded call, with a deadline.
until_called() {
  local deadline=$((SECONDS + 30))
  until grep -q -- "$1" "${CALLS}"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.1
  done
}

@test "the head is on the first node, the others join it, and the launcher runs there with all of them" {
  TACO_RATIO=0.3 job mixed.seed=3 "a='x y'"
  [ "${status}" -eq 0 ]
  run grep "^ray" "${CALLS}"
  [ "${#lines[@]}" -eq 3 ]
  [[ "${lines[0]}" == "ray <start> <--head> <--port> <24242>"*"<--node-ip-address> <127.0.0.1> <--node-name> <gpu1>"*"mode=token" ]]
  for line in "${lines[@]:1}"; do
    [[ "${line}" == "ray <start> <--address> <127.0.0.1:24242>"*"<--block>"*"mode=token" ]]
  done
  grep -qF "verl-mixed <train> <mixed.seed=3> <a='x y'> on=gpu1 MASTER_IP=127.0.0.1 PORT=24242 WORKERS=gpu2 gpu3 RATIO=0.3" "${CALLS}"
  grep -qx "gpu1 gpu2 gpu3" "${CALLS}"
  grep -q "scontrol show hostnames gpu\[1-3\]" "${CALLS}"
  clean
}

@test "the exit code is the run's, and everything is taken down" {
  TRAIN_EXIT=2 job
  [ "${status}" -eq 2 ]
  clean
}

@test "the token is a file of mode 0600 while the job runs, and in no argument" {
  WAITS=1 "${CHECKOUT}/cluster/slurm/mixed_training.sbatch" &
  job=$!
  until_called "<train>"
  token="${CHECKOUT}/runs/.slurm/4242/token"
  [ "$(stat -c %a "${token}")" = 600 ]
  [ "$(stat -c %s "${token}")" -eq 64 ]
  grep -q "^ask 127.0.0.1:24242 token=$(<"${token}")" "${CALLS}"
  run ! grep "^\(srun\|ray\|verl\).*$(<"${token}")" "${CALLS}"
  touch "${ALIVE}.stop"
  wait "${job}"
  clean
}

@test "RAY_AUTH_MODE=disabled makes no token and says so to every node" {
  RAY_AUTH_MODE=disabled job
  [ "${status}" -eq 0 ]
  [ "$(calls 'mode=disabled')" -eq 3 ]
  [ "$(calls 'token=$')" -ge 1 ]
}

@test "a node that does not join within the deadline is exit 1, and the others are taken down" {
  NEVER_JOINS=gpu3 JOIN_TIMEOUT_S=1 job
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"gpu3: not joined after 1 s"* ]]
  [ "$(calls '<train>')" -eq 0 ]
  clean
}

@test "Ray that ends on a node is said at once, with its last lines" {
  DIES=gpu2 JOIN_TIMEOUT_S=50 job
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no space left"*"gpu2: Ray ended before the cluster was complete"* ]]
  clean
}

@test "a job that is cancelled takes everything down" {
  WAITS=1 "${CHECKOUT}/cluster/slurm/mixed_training.sbatch" &
  job=$!
  until_called "<train>"
  kill -TERM "${job}"
  code=0
  wait "${job}" || code=$?
  [ "${code}" -eq 130 ]
  clean
}

@test "before the time is over the run is asked to save and stop, and its exit code counts" {
  WAITS=1 TRAIN_EXIT=5 "${CHECKOUT}/cluster/slurm/mixed_training.sbatch" mixed.experiment=demo &
  job=$!
  until_called "<train>"
  kill -USR1 "${job}"
  code=0
  wait "${job}" || code=$?
  [ "${code}" -eq 5 ]
  grep -q "verl-mixed <stop>" "${CALLS}"
  clean
}

# signalled SETTING...: a job that gets USR1 while it trains; its exit code becomes `code`, what it says `said`.
signalled() {
  env WAITS=1 TRAIN_EXIT=130 "$@" "${CHECKOUT}/cluster/slurm/mixed_training.sbatch" >"${BATS_TEST_TMPDIR}/said" 2>&1 &
  job=$!
  until_called "<train>"
  kill -USR1 "${job}"
  code=0
  wait "${job}" || code=$?
  said="$(<"${BATS_TEST_TMPDIR}/said")"
}

@test "a job whose time is over saves a checkpoint, takes everything down, and requeues itself" {
  signalled SAVES=1
  [ "${code}" -eq 130 ]
  [ "$(calls '^scontrol requeue 4242$')" -eq 1 ]
  [ "$(grep -n '^scontrol requeue' "${CALLS}" | cut -d: -f1)" -gt "$(grep -n '^verl-mixed <stop>' "${CALLS}" | cut -d: -f1)" ]
  [[ "${said}" == *"requeued: the job resumes the run"* ]]
  clean
}

@test "a job that saved nothing is not requeued, and says why; REQUEUE=0 requeues none" {
  mkdir -p "${CHECKOUT}/runs/old/checkpoints"
  touch "${CHECKOUT}/runs/old/checkpoints/latest_checkpointed_iteration.txt"
  signalled
  [ "$(calls '^scontrol requeue')" -eq 0 ]
  [[ "${said}" == *"not requeued: no checkpoint was saved"* ]]
  clean
  rm "${ALIVE}.stop"
  : >"${CALLS}"
  signalled SAVES=1 REQUEUE=0
  [ "$(calls '^scontrol requeue')" -eq 0 ]
}

@test "a job that is complete is not requeued" {
  signalled SAVES=1 TRAIN_EXIT=0
  [ "${code}" -eq 0 ]
  [ "$(calls '^scontrol requeue')" -eq 0 ]
}

@test "a launcher that was killed is started again as often as RETRIES lets it" {
  KILLS=1 job
  [ "${status}" -eq 137 ]
  [ "$(calls '<train>')" -eq 1 ]
  KILLS=1 RETRIES=1 job
  [ "${status}" -eq 0 ]
  [ "$(calls '<train>')" -eq 3 ]
  clean
}

@test "Ray that is killed on a node while the run goes on is started again" {
  WAITS=1 "${CHECKOUT}/cluster/slurm/mixed_training.sbatch" &
  job=$!
  until_called "<train>"
  kill -9 "$(<"${ALIVE}/gpu2")"
  deadline=$((SECONDS + 30))
  until [ "$(calls '^ray .*<gpu2>')" -eq 2 ]; do
    ((SECONDS < deadline))
    sleep 0.1
  done
  touch "${ALIVE}.stop"
  wait "${job}"
  clean
}

@test "a job that Slurm started again after its node died removes its own temporary folder, and no other" {
  sed -i 's|RAY_TEMP_DIR="${TEMP_DIRS}-${node}"|RAY_TEMP_DIR="${TEMP_DIRS}-${node}/verl_mixed_ray_4242"|' "${BATS_TEST_TMPDIR}/bin/srun"
  mkdir -p "${TEMP_DIRS}-gpu1/verl_mixed_ray_4242/tmp"
  job
  [ "${status}" -eq 1 ]
  SLURM_RESTART_COUNT=1 job
  [ "${status}" -eq 0 ]
  [ ! -e "${TEMP_DIRS}-gpu1/verl_mixed_ray_4242" ]
}

@test "a temporary folder of another job is left alone" {
  mkdir "${TEMP_DIRS}-gpu1"
  job
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"is on "*" already"* ]]
  [ -d "${TEMP_DIRS}-gpu1" ]
}

@test "outside of an allocation, or of the repository, it says so" {
  unset SLURM_JOB_ID
  job
  [ "${status}" -ne 0 ]
  [[ "${output}" == *"SLURM_JOB_ID: is not set"* ]]
  SLURM_JOB_ID=1 SLURM_SUBMIT_DIR=/ job
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"no repository in /"* ]]
}

@test "with CONTAINER_IMAGE every step is in the image, with the folders mounted, and nothing is installed here" {
  sed -i 's|^while|[[ "$1" != --help ]] \|\| { echo "  --container-image=..." \&\& exit; }\nwhile|' "${BATS_TEST_TMPDIR}/bin/srun"
  sed -i "2i [[ \"\$*\" != *sys.prefix* ]] || { echo '${VENV}'; exit; }" "${VENV}/bin/python" # the image's
  unset VENV
  PATH="${BATS_TEST_TMPDIR}/venv/bin:${PATH}" CONTAINER_IMAGE=img#1 SHARED_DIRS="/models /data" RAY_WORKER_PORTS=20000-20999 job
  [ "${status}" -eq 0 ] || cat "${CHECKOUT}/runs/.slurm/4242/"*.log
  [ "${status}" -eq 0 ]
  run ! grep -v -e " <--container-image=img#1> <--container-mounts=${CHECKOUT}:${CHECKOUT},/tmp:/tmp,${HOME}:${HOME},/models:/models,/data:/data> " \
    <(grep "^srun" "${CALLS}" | grep -v help)
  [ "$(grep -c "^ray.*<--min-worker-port> <20000> <--max-worker-port> <20999>" "${CALLS}")" -eq 3 ]
  grep -q "verl-mixed <train> on=gpu1" "${CALLS}"
  [ ! -e "${CHECKOUT}/.venv" ]
  clean
}

@test "CONTAINER_IMAGE without pyxis, or with CONDA_ENV, is exit 2 before anything is started" {
  CONTAINER_IMAGE=img job
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"srun has no --container-image here; pyxis must be installed"* ]]
  CONTAINER_IMAGE=img CONDA_ENV=mixed job
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"CONDA_ENV=mixed and CONTAINER_IMAGE"* ]]
  run ! grep "^ray" "${CALLS}"
}

@test "Ray itself on two addresses of this machine: both join, the run sees both, nothing is left" {
  [[ -n "${VERL_MIXED_REAL_RAY:-}" ]] || skip "set VERL_MIXED_REAL_RAY=1; it takes a minute and 2 GB"
  ray="$(command -v ray)" || skip "no ray on PATH"
  cp -r "${REPO_ROOT}/cluster/"*.py "${CHECKOUT}/cluster/"
  printf '#!/bin/sh\nexec "%s" "$@"\n' "${PYTHON3}" >"${VENV}/bin/python"
  printf '#!/bin/sh\nexec "%s" "$@"\n' "${ray}" >"${VENV}/bin/ray"
  printf '#!/bin/sh\nRAY_ADDRESS="${MASTER_IP}:${RAY_PORT}" python -m cluster.ray_nodes table\n' >"${VENV}/bin/verl-mixed"
  NODE_NAMES="gpu1 gpu2" NUM_CPUS=1 NUM_GPUS=0 TEMP_DIRS="/tmp/vmr${BASHPID}" run timeout 170 \
    "${CHECKOUT}/cluster/slurm/mixed_training.sbatch"
  [ "${status}" -eq 0 ] || cat "${CHECKOUT}/runs/.slurm/4242/"*.log
  [ "${status}" -eq 0 ]
  [[ "${output}" == *'"node": "gpu1"'* && "${output}" == *'"node": "gpu2"'* ]]
  run ! grep -lzs "vmr${BASHPID}" /proc/[0-9]*/cmdline
  run ! compgen -G "/tmp/vmr${BASHPID}-*"
}
