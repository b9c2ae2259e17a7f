#!/usr/bin/env bats
# setup_cluster.sh: every subcommand, option, failure and exit code, against hosts of this machine.
# bats file_tags=slow
bats_require_minimum_version 1.8.0

setup() {
  command -v tmux >/dev/null || skip "no tmux here"
  load cluster_helpers
  make_site
}

teardown() { end_site; }

@test "--help prints the header and asks no host" {
  run "${SCRIPT}" --help
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"Usage: setup_cluster.sh"* && "${output}" != *"set -euo"* ]]
  for command in setup status doctor sync logs attach restart cleanup; do
    [[ "${output}" == *"  ${command} "* ]]
  done
  [ ! -s "${CALLS}" ]
}

@test "wrong usage is exit 2, says what is wrong and asks no host" {
  local -A said=(
    ["explode"]="unknown command 'explode'"
    ["setup --nonsense"]="unknown option --nonsense"
    ["status --hosts"]="--hosts needs a file"
    ["setup head"]="setup takes no HOST"
    ["logs head node0"]="one HOST"
    ["logs nobody"]="no host 'nobody'"
    ["attach nobody"]="no host 'nobody'"
    ["doctor nobody"]="no host 'nobody'"
    ["status --hosts=/nonexistent"]="/nonexistent"
  )
  for words in "${!said[@]}"; do
    # shellcheck disable=SC2086 # the words are several arguments
    run "${SCRIPT}" ${words}
    [ "${status}" -eq 2 ]
    [[ "${output}" == *"error: "*"${said[${words}]}"* ]]
  done
  run "${SCRIPT}"
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"no command"* ]]
  [ ! -s "${CALLS}" ]
}

@test "a time or a size that is no number is exit 2 and is named" {
  SYNC_MAX_MB=64M run "${SCRIPT}" sync
  [ "${status}" -eq 2 ]
  [[ "${output}" == "error: SYNC_MAX_MB=64M: want a whole number" ]]
  [ ! -s "${CALLS}" ]
}

@test "every wrong setting is named at once, with exit 2" {
  printf '[head]\na ssh_port=0\nb\n[wrokers]\n' >"${HOSTS_FILE}"
  run "${SCRIPT}" setup
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"hosts:2: ssh_port=0"* && "${output}" == *"hosts:3: b is a second head"* ]]
  [[ "${output}" == *"hosts:4: unknown group [wrokers]"* ]]
}

@test "no head is exit 2 and says where to write it" {
  unset HOSTS_FILE
  run "${SCRIPT}" setup
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"MASTER_IP is empty"* ]]
}

@test "--dry-run of every command prints what it would do and runs no ssh" {
  for command in setup status restart cleanup logs attach doctor sync; do
    run --separate-stderr "${SCRIPT}" "${command}" --dry-run --force
    [ "${status}" -eq 0 ]
    # shellcheck disable=SC2154 # set by run
    [[ "${stderr}" == *"+ ssh "* ]]
  done
  [ ! -s "${CALLS}" ]
  [ ! -e "${CHECKOUT}/.cluster" ]
}

@test "--dry-run of setup names every host and holds no token" {
  run "${SCRIPT}" setup --dry-run
  # shellcheck disable=SC2153 # HEAD is cluster_helpers.bash's
  for host in "${HEAD}" w0 w1; do
    [[ "${output}" == *"+ ssh ${host} bash -s -- probe"* && "${output}" == *"+ ssh ${host} bash -s -- start"* ]]
  done
  run ! grep -E '[0-9a-f]{64}' <<<"${output}"
}

@test "setup starts the head and the workers, ends with a table, and is idempotent" {
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"${HEAD}: head: started (session head)"* && "${output}" == *"w1: worker: started (session node1)"* ]]
  [[ "${lines[-2]}" == "setup: 3 of 3 nodes joined in "*" s" ]]
  [[ "${lines[-1]}" == "next: ./run_mixed_training.sh"* ]]
  [[ "${output}" == *"dashboard: http://127.0.0.1:${RAY_DASHBOARD_PORT} through: ssh -N -L "*" ${HEAD}"* ]]
  grep -q -- "ray start --head --port ${RAY_PORT} --dashboard-host 127.0.0.1" "${SITE}/ray_calls"
  grep -q -- "ray start --address \\\\\[fd00::1\\\\\]:${RAY_PORT}" "${SITE}/ray_calls"
  local pid
  pid="$(pid_of node0)"
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"${HEAD}: head: up already"* && "${output}" == *"w0: worker: up already"* ]]
  [ "$(pid_of node0)" = "${pid}" ]
}

@test "with several clusters, the next command names this one" {
  mkdir -p "${CHECKOUT}/.cluster/10.0.0.9"
  touch "${CHECKOUT}/.cluster/10.0.0.9/hosts"
  run "${SCRIPT}" setup
  [[ "${lines[-1]}" == "next: MASTER_IP=${HEAD} ./run_mixed_training.sh"* ]]
}

@test "a variable of the block that no one reads is exit 2, with the nearest setting" {
  sed -i 's/^  MASTER_IP=""/  MASTR_IP=a/; s/^  SSH_USER=""/  MODEL_PATH=b/' "${SCRIPT}"
  cp "${REPO_ROOT}/run_mixed_training.sh" "${CHECKOUT}"
  run "${SCRIPT}" setup
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"error: MASTR_IP in the settings block of setup_cluster.sh: "*"the nearest is MASTER_IP"* ]]
  [[ "${output}" == *"error: MODEL_PATH "*"it is a setting of run_mixed_training.sh"* ]]
  [ ! -s "${CALLS}" ]
}

@test "MASTER_IP=local is no head: exit 2" {
  unset HOSTS_FILE
  MASTER_IP=local run "${SCRIPT}" setup
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"MASTER_IP=local is a run on this machine alone"* ]]
}

@test "CONDA_PATH may be the activation script: nodes use the folder of that conda" {
  mkdir -p "${SITE}/conda/etc/profile.d" "${SITE}/conda/envs"
  ln -s "${SITE}/venv" "${SITE}/conda/envs/rl"
  touch "${SITE}/conda/etc/profile.d/conda.sh"
  ln -s "${SITE}/conda/etc/profile.d/conda.sh" "${SITE}/conda/linked.sh" # as /etc/profile.d/conda.sh is
  sed -i '/^venv=/d' "${HOSTS_FILE}"
  for path in bin/activate etc/profile.d/conda.sh linked.sh; do
    CONDA_ENV=rl CONDA_PATH="${SITE}/conda/${path}" run "${SCRIPT}" setup
    [ "${status}" -eq 0 ]
    grep -q "^if \\. ${SITE}/conda/etc/profile.d/conda.sh " "${SITE}/${HEAD}/.verl_mixed/${HEAD}/env"
    grep -q "PATH=${SITE}/conda/envs/rl/bin:" "${SITE}/${HEAD}/.verl_mixed/${HEAD}/env"
  done
}

@test "the token is made once, is private, reaches every Ray and stands in no argument" {
  "${SCRIPT}" setup
  local token file
  token="$(cat "${CHECKOUT}/.cluster/${HEAD}/token")"
  [[ "${token}" =~ ^[0-9a-f]{64}$ ]]
  for file in "${CHECKOUT}/.cluster/${HEAD}/token" "${SITE}/${HEAD}/.verl_mixed/${HEAD}/token" \
    "${SITE}/w0/.verl_mixed/${HEAD}.fd00::2/token"; do
    [ "$(cat "${file}")" = "${token}" ]
    [ "$(stat -c %a "${file}")" = 600 ]
    [ "$(stat -c %a "$(dirname "${file}")")" = 700 ]
  done
  [ "$(grep -c "mode=token token=${token}" "${SITE}/ray_calls")" -eq 3 ]
  run ! grep -q "${token}" "${CALLS}"
  run ! grep -qa "${token}" /proc/[0-9]*/cmdline
}

@test "RAY_AUTH_MODE=disabled is said to every Ray and makes no token" {
  RAY_AUTH_MODE=disabled "${SCRIPT}" setup
  [ "$(grep -c "mode=disabled token= " "${SITE}/ray_calls")" -eq 3 ]
  [ ! -e "${CHECKOUT}/.cluster/${HEAD}/token" ]
}

@test "what setup recorded serves the next command without any setting" {
  "${SCRIPT}" setup
  local port="${RAY_DASHBOARD_PORT}"
  unset HOSTS_FILE RAY_PORT RAY_DASHBOARD_PORT
  run "${SCRIPT}" status
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"127.0.0.1:${port}"* ]]
}

@test "ssh gets user, port, key, jump and options, and the environment wins over the file" {
  sed -i 's/^w0 /w0 ssh_user=file ssh_port=2222 ssh_jump=me@gate /' "${HOSTS_FILE}"
  SSH_USER=environment SSH_KEY=/k/id SSH_OPTIONS='-o StrictHostKeyChecking=no' "${SCRIPT}" status || true
  grep -q -- "BatchMode=yes.*-o StrictHostKeyChecking=no -p 2222 -i /k/id -J me@gate environment@w0" "${CALLS}"
}

@test "a worker that does not answer is left out and named; the others go on; exit 1" {
  touch "${SITE}/w0/down"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w0: ssh: no probe from it: ssh: connect to host w0 port 22: No route to host"* ]]
  [[ "${output}" == *"error: w0: left out"* && "${lines[-1]}" == "setup: 2 of 3 nodes joined in "* ]]
  is_up head && is_up node1
}

@test "a head that does not answer stops setup before anything starts; exit 1" {
  touch "${SITE}/${HEAD}/down"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"the head is not good"*"nothing was started"* ]]
  [ ! -e "${SITE}/ray_calls" ]
}

@test "another version on a worker is bad and leaves it out" {
  echo 2.0 >"${SITE}/w1/version_verl"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w1: packages: verl 2.0 (head: 1.0)"* ]]
  is_up node0
  [ ! -e "${SITE}/alive_node1" ]
}

@test "a tmux session of somebody else is named, left out and not touched" {
  on w0 tmux new-session -d -s node0 sleep 1000
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w0: session: a tmux session 'node0' that is not of this cluster"* ]]
  "${SCRIPT}" cleanup --yes
  on w0 tmux has-session -t =node0
}

@test "a folder of somebody else at RAY_TEMP_DIR is bad and stays" {
  mkdir -p "/tmp/vm_${HEAD}_w0/precious"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w0: disk: RAY_TEMP_DIR=/tmp/vm_${HEAD}_w0 exists and is not of this cluster"* ]]
  "${SCRIPT}" cleanup --yes
  [ -d "/tmp/vm_${HEAD}_w0/precious" ]
}

@test "a port of the head that another program holds is bad" {
  python3 -c 'import os, socket, time
s = socket.create_server(("127.0.0.1", int(os.environ["RAY_PORT"]))); time.sleep(60)' 3>&- &
  local holder=$!
  until grep -qi ":$(printf %04X "${RAY_PORT}") .* 0A " /proc/net/tcp; do :; done
  run "${SCRIPT}" setup
  kill "${holder}"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: ${HEAD}: ports: port ${RAY_PORT} held by another program"* ]]
}

@test "a shared folder that is not the same is bad, and no file stays in it" {
  mkdir "${SITE}/shared"
  SHARED_DIRS="${SITE}/shared" "${SCRIPT}" setup
  [ -z "$(ls -A "${SITE}/shared")" ]
  SHARED_DIRS="${SITE}/shared ${SITE}/missing" run "${SCRIPT}" doctor
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: ${HEAD}: shared: ${SITE}/missing cannot be written; mount it"* ]]
}

@test "a worker's Ray that ends at once is named with its last words; exit 1" {
  touch "${SITE}/w1/ray_fails"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w1: the worker did not start"*"ValueError: no such option"* ]]
  [[ "${lines[-1]}" == "setup: 2 of 3 nodes joined in "* ]]
}

@test "a head's Ray that ends at once stops setup; exit 1" {
  touch "${SITE}/${HEAD}/ray_fails"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: ${HEAD}: the head did not start"*"ValueError: no such option"* ]]
}

@test "a worker that never joins is given up at the deadline and told what to look at" {
  touch "${SITE}/w0/ray_hangs"
  START_TIMEOUT_S=2 run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w0: the worker did not start"*"Ray did not start within 2 s"*"does not answer from here"* ]]
}

@test "a worker whose Ray died starts it again by itself, and stop ends it for good" {
  "${SCRIPT}" setup
  local pid try
  pid="$(pid_of node0)"
  kill -9 "${pid}"
  for ((try = 0; try < 300; try++)); do
    [[ "$(pid_of node0)" == "${pid}" ]] || ! is_up node0 || break
    sleep 0.1
  done
  is_up node0
  pid="$(pid_of node0)"
  "${SCRIPT}" cleanup --yes
  ended "${pid}"
  [ "$(pid_of node0)" = "${pid}" ]
}

@test "setup starts a worker again whose session died, and leaves the others alone" {
  "${SCRIPT}" setup
  local others
  others="$(pid_of head) $(pid_of node1)"
  kill_node w0 node0
  run "${SCRIPT}" status
  [ "${status}" -eq 1 ]
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"w0: worker: started again (session node0)"* ]]
  [ "$(pid_of head) $(pid_of node1)" = "${others}" ]
}

@test "workers join anew when the head is a new one" {
  "${SCRIPT}" setup
  local pid
  pid="$(pid_of node0)"
  kill_node "${HEAD}" head
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [ "$(pid_of node0)" != "${pid}" ]
}

@test "status is exit 0 with every node there, and 1 with one missing or silent" {
  "${SCRIPT}" setup
  run "${SCRIPT}" status
  [ "${status}" -eq 0 ]
  touch "${SITE}/w1/down"
  run "${SCRIPT}" status
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w1: no answer by ssh (ssh: connect to host w1 port 22: No route to host)"* ]]
  [[ "${output}" == *"w1 "*"no answer"* ]]
}

@test "status before setup is exit 1 and says what to do" {
  run "${SCRIPT}" status
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no cluster was set up here"* ]]
}

@test "restart stops all and starts all" {
  "${SCRIPT}" setup
  local head
  head="$(pid_of head)"
  run "${SCRIPT}" restart --yes
  [ "${status}" -eq 0 ]
  [[ "${lines[-2]}" == "setup: 3 of 3 nodes joined in "* ]]
  [ "$(pid_of head)" != "${head}" ]
  ended "${head}"
}

@test "restart and cleanup refuse while a run is at work on the head, and end it with --force" {
  "${SCRIPT}" setup
  start_run verl_training_demo
  start_run verl_training_other
  for command in restart cleanup; do
    run "${SCRIPT}" "${command}" --yes
    [ "${status}" -eq 1 ]
    [[ "${output}" == *"a run goes on (tmux session verl_training_demo is running on ${HEAD})"*"--force"* ]]
  done
  is_up head
  run "${SCRIPT}" cleanup --yes --force
  [ "${status}" -eq 0 ]
  run on "${HEAD}" tmux list-sessions
  [[ "${output}" != *verl_training* ]]
}

@test "programs of the user are not ended: by the file env, by a Ray log that is read, in a pane beside ours" {
  "${SCRIPT}" setup
  local log pid
  log="/tmp/vm_${HEAD}_w0/session_1/logs/raylet.out"
  # shellcheck disable=SC1090 # written by setup
  (set +eu && . "${SITE}/w0/.verl_mixed/${HEAD}."*/env && exec sleep 1000) 3>&- &
  local -a theirs=($!)
  until [[ "$(tr '\0' '\n' <"/proc/${theirs[0]}/environ")" == *RAY_TEMP_DIR=* ]]; do :; done # it has the file's variables
  tail -f "${log}" >/dev/null 3>&- &
  theirs+=($!)
  on w0 tmux split-window -d -t =node0: sleep 1000
  theirs+=("$(on w0 tmux list-panes -t =node0: -F '#{pane_pid}' | tail -n 1)")
  for command in "restart --yes" "cleanup --yes"; do
    # shellcheck disable=SC2086 # two words
    run "${SCRIPT}" ${command}
    [ "${status}" -eq 0 ]
    for pid in "${theirs[@]}"; do
      kill -0 "${pid}" # of several pids, one that lives would do
    done
  done
  run ! is_up node0
  kill "${theirs[@]}"
}

@test "restart refuses while Ray runs a job" {
  "${SCRIPT}" setup
  touch "${SITE}/job"
  run "${SCRIPT}" restart --yes
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"a job of Ray runs"* ]]
}

@test "restart and cleanup without --yes ask, and without a terminal they are exit 2" {
  for command in restart cleanup; do
    run "${SCRIPT}" "${command}" </dev/null
    [ "${status}" -eq 2 ]
    [[ "${output}" == *"give --yes"* ]]
  done
  [ ! -s "${CALLS}" ]
}

@test "cleanup leaves no process, session or file of ours, and everything of others" {
  "${SCRIPT}" setup
  on w0 tmux new-session -d -s mine sleep 1000
  sleep 1000 3>&- &
  local other=$! name
  local -a pids=("$(pid_of head)" "$(pid_of node0)" "$(pid_of node1)")
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
  for name in "${pids[@]}"; do
    ended "${name}"
  done
  run ! compgen -G "/tmp/vm_${HEAD}_*"
  run ! compgen -G "${SITE}/*/.verl_mixed"
  [ ! -e "${CHECKOUT}/.cluster" ]
  run ! on w0 tmux has-session -t =node0
  on w0 tmux has-session -t =mine
  kill "${other}"
}

@test "cleanup ends what outlived its tmux session" {
  "${SCRIPT}" setup
  local pid
  pid="$(pid_of node0)"
  kill -STOP "${pid}" # the hang-up of its terminal does not end it
  on w0 tmux kill-server
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
  ended "${pid}"
}

@test "cleanup names a host that does not answer, cleans the others, and can be run again" {
  "${SCRIPT}" setup
  touch "${SITE}/w0/down"
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w0: no answer by ssh"* && "${output}" == *"w1: clean"* ]]
  [ -e "${CHECKOUT}/.cluster/${HEAD}/hosts" ]
  rm "${SITE}/w0/down"
  unset HOSTS_FILE
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
  [ ! -e "${CHECKOUT}/.cluster" ]
}

@test "cleanup of nothing is good" {
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
}

@test "logs shows the pane and Ray's logs of the head, or of the host that is named either way" {
  "${SCRIPT}" setup
  run "${SCRIPT}" logs
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"tmux session head (ours_alive)"*"Ray runtime started."*"raylet of ${HEAD}"* ]]
  run "${SCRIPT}" logs node1
  [[ "${output}" == *"raylet of w1"* ]]
  run "${SCRIPT}" logs w0
  [[ "${output}" == *"raylet of w0"* ]]
}

@test "logs -f follows" {
  "${SCRIPT}" setup
  "${SCRIPT}" logs -f node0 >"${SITE}/followed" 3>&- &
  until grep -q "raylet of w0" "${SITE}/followed"; do :; done
  echo "one line more" >>"/tmp/vm_${HEAD}_w0/session_1/logs/raylet.out"
  until grep -q "one line more" "${SITE}/followed"; do :; done
  "${SCRIPT}" cleanup --yes # it also ends the far tail, which this script has started
  wait
}

@test "logs of a host that does not answer is exit 1" {
  touch "${SITE}/w0/down"
  run "${SCRIPT}" logs w0
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w0: no logs"* ]]
}

@test "attach opens the node's session in a terminal" {
  mkdir "${SITE}/w1/bin"
  printf '#!/bin/sh\necho "tmux $*"\n' >"${SITE}/w1/bin/tmux"
  chmod +x "${SITE}/w1/bin/tmux"
  run --separate-stderr "${SCRIPT}" attach w1
  [ "${status}" -eq 0 ]
  [ "${output}" = "tmux attach -t =node1" ]
  grep -q "^ssh -t " "${CALLS}"
}

@test "attach to a session that is not there is exit 1" {
  run "${SCRIPT}" attach node0
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w0: cannot attach to tmux session node0"* ]]
}

@test "doctor checks as setup does, runs the project's own on the head, and starts nothing" {
  run "${SCRIPT}" doctor
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"doctor in ${SITE}/${HEAD}/repo with RAY_AUTH_MODE=unset: doctor"* ]]
  [ ! -e "${SITE}/ray_calls" ]
  [ ! -e "${SITE}/${HEAD}/.verl_mixed" ]
  touch "${SITE}/w1/down"
  run "${SCRIPT}" doctor w1
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w1: ssh"* ]]
  run "${SCRIPT}" doctor w0
  [ "${status}" -eq 0 ]
}

@test "sync copies the checkout, removes what is gone, and keeps results and what it did not bring" {
  git -C "${CHECKOUT}" init -q
  printf '.cluster/\nignored\n' >"${CHECKOUT}/.gitignore"
  touch "${CHECKOUT}/ignored" "${CHECKOUT}/old file"
  mkdir -p "${SITE}/w0/repo/runs" "${SITE}/w0/repo/.venv"
  touch "${SITE}/w0/repo/"{runs/result,.venv/kept,theirs}
  run "${SCRIPT}" sync
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"w0: copied to ${SITE}/w0/repo"* ]]
  [ -x "${SITE}/w0/repo/setup_cluster.sh" ]
  [ -e "${SITE}/w0/repo/old file" ]
  [ ! -e "${SITE}/w0/repo/ignored" ]
  grep -q "^content=" "${SITE}/w0/repo/.synced_commit"
  rm "${CHECKOUT}/old file"
  "${SCRIPT}" sync
  [ ! -e "${SITE}/w0/repo/old file" ]
  [ -e "${SITE}/w0/repo/runs/result" ]
  [ -e "${SITE}/w0/repo/.venv/kept" ]
  [ -e "${SITE}/w0/repo/theirs" ]
  [ ! -e "${CHECKOUT}/.cluster" ]
}

@test "sync writes into no git checkout, not into itself, and once into a shared folder" {
  git -C "${SITE}/w0/repo" init -q
  sed -i "s|^w1 \(.*\)repo=[^ ]*|w1 \1repo=${SITE}/${HEAD}/repo|" "${HOSTS_FILE}"
  run "${SCRIPT}" sync
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w0: not synced"*"is a git checkout of its own"* ]]
  [[ "${output}" == *"w1: ${SITE}/${HEAD}/repo is shared with another host"* ]]
  sed -i "s|repo=[^ ]*|repo=${CHECKOUT}|" "${HOSTS_FILE}"
  run "${SCRIPT}" sync
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"w0: ${CHECKOUT} is this folder"* ]]
  [ ! -e "${CHECKOUT}/.synced_commit" ]
}

@test "sync without an environment makes .venv, and says what helps where that fails" {
  sed -i 's/^venv=.*//; s/^\[all:vars\]//' "${HOSTS_FILE}"
  mkdir -p "${CHECKOUT}/requirements"
  cat >"${CHECKOUT}/cluster/lib/bootstrap.sh" <<'FAKE'
bootstrap() { [[ ! -e "${HOME}/offline" ]] && mkdir -p "${REPO_ROOT}/.venv/made_for_$1"; }
FAKE
  touch "${SITE}/w1/offline"
  run "${SCRIPT}" sync
  [ "${status}" -eq 1 ]
  [ -d "${SITE}/w0/repo/.venv/made_for_run" ]
  [[ "${output}" == *"error: w1: not synced"*"when this host reaches no package index"* ]]
}

@test "sync and a start under a live run change nothing on the hosts, unless they have this code already" {
  "${SCRIPT}" setup
  "${SCRIPT}" sync
  start_run verl_training_one
  run "${SCRIPT}" sync
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"every host has this code already: nothing is copied"* ]]
  touch "${CHECKOUT}/changed"
  run "${SCRIPT}" sync
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"a run goes on"*"nothing is copied under it"* ]]
  run ! compgen -G "${SITE}/*/repo/changed"
}

@test "sync --check compares the commits, also of clones on the hosts, and copies nothing" {
  local host
  printf '.cluster/\n' >"${CHECKOUT}/.gitignore"
  git -C "${CHECKOUT}" init -q
  git -C "${CHECKOUT}" add .
  git -C "${CHECKOUT}" -c user.name=a -c user.email=a@b commit -qm one
  for host in "${HEAD}" w0 w1; do
    rm -r "${SITE}/${host}/repo"
    git clone -q "${CHECKOUT}" "${SITE}/${host}/repo"
    touch "${SITE}/${host}/repo/edited"
  done
  run "${SCRIPT}" sync --check
  [ "${status}" -eq 0 ]
  git -C "${SITE}/w0/repo" -c user.name=a -c user.email=a@b commit -q --allow-empty -m two
  run "${SCRIPT}" sync --check
  [ "${status}" -eq 1 ]
  echo "${output}"
  [[ "${output}" == *"w0: has $(git -C "${SITE}/w0/repo" rev-parse HEAD | cut -c1-12)+changes, here is "* ]]
  [[ "${output}" != *"w1: has"* ]]
  run "${SCRIPT}" sync
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"--no-sync"* ]]
}

@test "sync sends no secrets, no data and no large files, by rsync where both sides have it and else by tar" {
  local with without="${SITE}/no_rsync"
  mkdir -p "${CHECKOUT}/data" "${CHECKOUT}/sub" "${without}"
  touch "${CHECKOUT}/data/rows" "${CHECKOUT}/.env" "${CHECKOUT}/sub/.env.local" "${CHECKOUT}/sub/kept"
  truncate -s 2M "${CHECKOUT}/model"
  printf '#!/bin/sh\necho rsync >>"%s/rsync_calls"\nexec %s "$@"\n' "${SITE}" "$(command -v rsync || echo false)" \
    >"${SITE}/bin/rsync"
  chmod +x "${SITE}/bin/rsync"
  for with in tar rsync; do
    if [[ "${with}" == tar ]]; then mv "${SITE}/bin/rsync" "${without}"; else mv "${without}/rsync" "${SITE}/bin"; fi
    if [[ "${with}" == tar ]] && command -v rsync >/dev/null; then continue; fi
    if [[ "${with}" == rsync ]] && ! PATH="${PATH#*:}" command -v rsync >/dev/null; then continue; fi
    rm -rf "${SITE}/w0/repo/sub"
    SYNC_MAX_MB=1 run "${SCRIPT}" sync
    [ "${status}" -eq 0 ]
    [[ "${output}" == *"warning: not copied, 2097152 bytes (SYNC_MAX_MB=1): model"* ]]
    [ -e "${SITE}/w0/repo/sub/kept" ]
    [[ "${with}" == tar || -s "${SITE}/rsync_calls" ]]
    for file in data/rows .env sub/.env.local model; do
      [ ! -e "${SITE}/w0/repo/${file}" ]
    done
  done
}

@test "variables of this shell reach Ray on every host, a host's own come before them, and no secret is shown" {
  sed -i "/^w0 /s|\$| env=\"NCCL_DEBUG=INFO MINE='a b'\" setup_commands=\"export LOADED=yes; false\"|" "${HOSTS_FILE}"
  export NCCL_DEBUG=WARN https_proxy=http://user:hidden@proxy HF_TOKEN=hf_hidden MY_TOKEN=named OTHER=no
  ENV_FORWARD="NCCL_* https_proxy MY_TOKEN MY_*" run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "${output}" != *hidden* && "${output}" != *named* ]]
  run ! grep -e hidden -e named "${CALLS}"
  # the stand-in ssh keeps this shell's variables, so what the hosts wrote is read in an empty shell
  of() { env -i bash -c '. "$1" && printf "%s" "${!2-unset}"' of "${SITE}/$1/.verl_mixed/${HEAD}"*/env "$2"; }
  [ "$(of "${HEAD}" NCCL_DEBUG)" = WARN ]
  [ "$(of w1 MY_TOKEN)" = named ]
  [ "$(of w1 https_proxy)" = http://user:hidden@proxy ]
  [ "$(of w0 NCCL_DEBUG)" = INFO ]
  [ "$(of w0 MINE)" = "a b" ]
  [ "$(of w0 LOADED)" = yes ]
  [ "$(of w1 LOADED)" = unset ]
  [ "$(of w1 OTHER)" = unset ]
  [ "$(stat -c %a "${CHECKOUT}/.cluster/${HEAD}/environment")" = 600 ]
}

@test "what a .bashrc of a host prints is taken for no result: sync copies, and a worker that is up stays up" {
  printf 'Welcome\nsame\n' | tee "${SITE}/w0/banner" >"${SITE}/${HEAD}/banner"
  run "${SCRIPT}" sync
  [[ "${output}" == *"w0: copied to ${SITE}/w0/repo"* && -e "${SITE}/w0/repo/setup_cluster.sh" ]]
  "${SCRIPT}" setup
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"${HEAD}: head: up already"*"w0: worker: up already"* ]]
}

@test "every far word is quoted for login shells that are not bash" {
  "${SCRIPT}" attach || true
  grep -qF "'=head'" <(sed 's/\\//g' "${CALLS}")
}

@test "a list of hosts that was changed is named, and restart makes it so" {
  "${SCRIPT}" setup
  write_hosts "${HEAD}" w1
  sed -i 's/^w1 ip=fd00::2/w1 ip=fd00::3/' "${HOSTS_FILE}"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"warning: w0: set up as worker, and no longer in the list of hosts"* ]]
  [[ "${output}" == *"bad: w1: session: Ray of this cluster is up here as node1, and the list of hosts makes it node0"* ]]
  run "${SCRIPT}" restart --yes
  on w1 tmux has-session -t =node0
  run ! on w1 tmux has-session -t =node1
}

@test "a Ray that is up with another token or setting is named and left as it is" {
  "${SCRIPT}" setup
  local token="${SITE}/${HEAD}/.verl_mixed/${HEAD}/token"
  cp "${token}" "${SITE}/token"
  NUM_CPUS=3 run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"Ray is up with another NUM_CPUS: run './setup_cluster.sh restart'"* ]]
  NUM_CPUS=3 HOST_ENV=A=1 run "${SCRIPT}" status # which a start of a run asks
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"error: w1: Ray is up with another NUM_CPUS, HOST_ENV or SETUP_COMMANDS: run './setup_cluster.sh restart'"* ]]
  run "${SCRIPT}" status
  [ "${status}" -eq 0 ]
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  rm -r "${CHECKOUT}/.cluster"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"Ray is up with another token"* ]]
  cmp "${token}" "${SITE}/token"
}

@test "cleanup removes the RAY_TEMP_DIR that was set up, also when the setting is another now" {
  "${SCRIPT}" setup
  RAY_TEMP_DIR=/tmp/vm_other run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
  run ! compgen -G "/tmp/vm_${HEAD}_*"
}

@test "restart --force asks the run for a checkpoint before it ends it" {
  "${SCRIPT}" setup
  start_run verl_training_one
  # shellcheck disable=SC2016 # the fake expands these
  printf '#!/usr/bin/env bash\necho "$PWD $*" >"${SITE}/stopped"\ntmux kill-session -t =verl_training_one\n' \
    >"${SITE}/venv/bin/verl-mixed"
  run "${SCRIPT}" restart --yes --force
  [ "${status}" -eq 0 ]
  [ "$(cat "${SITE}/stopped")" = "${SITE}/${HEAD}/repo stop --grace 5 runs/one" ]
}

@test "a second command of the same checkout waits for the first" {
  exec 8<"${CHECKOUT}"
  flock 8
  "${SCRIPT}" setup 2>"${SITE}/said" 3>&- 8<&- &
  local setup=$!
  until grep -q "another setup_cluster.sh of this checkout is running" "${SITE}/said"; do :; done
  [ ! -s "${CALLS}" ]
  flock -u 8
  wait "${setup}"
}

@test "on the head itself no ssh is used" {
  write_hosts 127.0.0.1
  sed -i 's/ip=fd00::1 //' "${HOSTS_FILE}"
  # a fresh login shell has no variables of this test
  sed -i "2i export SITE=${SITE} RAY_PORT=${RAY_PORT} FAKE_HOST=127.0.0.1" "${SITE}/venv/bin/"{ray,python}
  export HOME="${SITE}/127.0.0.1" TMUX_TMPDIR="${SITE}/127.0.0.1/tmux"
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  is_up head
  unset HOSTS_FILE
  rm -r "${CHECKOUT}/.cluster"
  run "${SCRIPT}" status # by the record that the head keeps
  [ "${status}" -eq 0 ]
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
  [ "$(calls '^ssh')" -eq 0 ]
}

@test "a hosts file that is no text is exit 2 and is named" {
  printf '\377\376[head]\n' >"${HOSTS_FILE}"
  run "${SCRIPT}" status
  [ "${status}" -eq 2 ]
  [[ "${output}" == "error: ${HOSTS_FILE}: no text in UTF-8"* ]]
}

@test "the script works through a symlink and from another folder" {
  ln -s "${SCRIPT}" "${SITE}/link"
  cd /
  "${SITE}/link" status --dry-run
}
