# shellcheck shell=bash
# Hosts for setup_cluster.sh on this machine: an `ssh` that records its words and runs the command here with a HOME and
# a tmux server per host, and an environment whose `ray` listens on the head's port and whose `python` says who is up.

REPO_ROOT="$(cd -- "${BATS_TEST_DIRNAME}/../.." && pwd)"

make_site() {
  export SITE="${BATS_TEST_TMPDIR}"
  export CALLS="${SITE}/calls"
  CHECKOUT="${SITE}/checkout"
  export HEAD="h${RANDOM}${RANDOM}" # the cluster's mark in /proc must not be that of another test
  export SCRIPT="${CHECKOUT}/setup_cluster.sh"
  : >"${CALLS}"
  mkdir -p "${CHECKOUT}/cluster" "${SITE}/bin" "${SITE}/venv/bin"
  cp -r "${REPO_ROOT}/cluster/lib" "${REPO_ROOT}/cluster/"*.py "${CHECKOUT}/cluster"
  mkdir -p "${CHECKOUT}/verl_mixed/checks" "${CHECKOUT}/config"
  cp "${REPO_ROOT}/config/"{__init__,child,environment,text_table}.py "${CHECKOUT}/config"
  cp "${REPO_ROOT}/verl_mixed/__init__.py" "${CHECKOUT}/verl_mixed"
  cp "${REPO_ROOT}/verl_mixed/checks/"{__init__,finding,hosts}.py "${CHECKOUT}/verl_mixed/checks"
  cp "${REPO_ROOT}/setup_cluster.sh" "${CHECKOUT}"
  make_programs
  RAY_PORT="$(free_port 30000)"
  RAY_DASHBOARD_PORT="$(free_port 31000)"
  export RAY_PORT RAY_DASHBOARD_PORT START_TIMEOUT_S=20 STOP_GRACE_S=5 RUN_GRACE_S=5 PATH="${SITE}/bin:${PATH}"
  unset MASTER_IP WORKER_NODES CONDA_ENV CONDA_PATH VENV WANDB_DIR RAY_TEMP_DIR RAY_AUTH_MODE RAY_DASHBOARD_HOST \
    SSH_USER SSH_PORT SSH_KEY SSH_OPTIONS SSH_JUMP REMOTE_REPO SHARED_DIRS NUM_CPUS NUM_GPUS OBJECT_STORE_MEMORY \
    HOSTS_FILE DRY_RUN PYTHON TMUX
  write_hosts "${HEAD}" w0 w1
}

# write_hosts HEAD WORKER...: the hosts file, and a folder with home and repository for each.
write_hosts() {
  local host number=1
  export HOSTS_FILE="${SITE}/hosts"
  printf '[all:vars]\nvenv=%s\n[head]\n' "${SITE}/venv" >"${HOSTS_FILE}"
  for host in "$@"; do
    mkdir -p "${SITE}/${host}/tmux" "${SITE}/${host}/repo"
    printf 'commit=%s\ndirty=0\ncontent=\n' 0123456789abcdef >"${SITE}/${host}/repo/.synced_commit"
    # an IPv6 address, because the probe asks the kernel whether an IPv4 one is the host's own
    printf '%s ip=fd00::%d repo=%s ray_temp_dir=%s\n' "${host}" "${number}" "${SITE}/${host}/repo" "/tmp/vm_${HEAD}_${host}" \
      >>"${HOSTS_FILE}"
    ((number > 1)) || printf '[workers]\n' >>"${HOSTS_FILE}"
    number=$((number + 1))
  done
}

make_programs() {
  cat >"${SITE}/bin/ssh" <<'FAKE'
#!/usr/bin/env bash
call="$(printf '%q ' ssh "$@")"
echo "${call}" >>"${CALLS}" # in one piece: others write beside it
while (($# > 0)); do
  case "$1" in
    -n) exec </dev/null ;;
    -t) ;;
    -O) exit 0 ;;
    -*) shift ;;
    *) break ;;
  esac
  shift
done
host="${1#*@}"
shift
if [[ -e "${SITE}/${host}/down" ]]; then
  echo "ssh: connect to host ${host} port 22: No route to host" >&2
  exit 255
fi
export HOME="${SITE}/${host}" TMUX_TMPDIR="${SITE}/${host}/tmux" FAKE_HOST="${host}"
PATH="${SITE}/${host}/bin:${PATH}"
cd "${HOME}"
[[ ! -e banner ]] || cat banner # as a .bashrc that prints
exec bash -c "$*"
FAKE
  cat >"${SITE}/venv/bin/ray" <<'FAKE'
#!/usr/bin/env bash
# ray start ...: the node is alive while this process is
call="$(printf '%q ' ray "$@" "mode=${RAY_AUTH_MODE}" "token=$(cat "${RAY_AUTH_TOKEN_PATH:-/dev/null}")")"
echo "${call}" >>"${SITE}/ray_calls" # in one piece: others write beside it
[[ ! -e "${HOME}/ray_fails" ]] || { echo "ValueError: no such option" && exit 1; }
mkdir -p "${RAY_TEMP_DIR}/session_1/logs"
ln -sfn "${RAY_TEMP_DIR}/session_1" "${RAY_TEMP_DIR}/session_latest"
echo "raylet of ${FAKE_HOST}" >"${RAY_TEMP_DIR}/session_1/logs/raylet.out"
[[ ! -e "${HOME}/ray_hangs" ]] || exec sleep 1000
exec python3 -c '
import os, socket, sys
if "--head" in sys.argv:
    listener = socket.create_server(("127.0.0.1", int(os.environ["RAY_PORT"])))
name = sys.argv[sys.argv.index("--node-name") + 1]
open(os.environ["SITE"] + "/alive_" + name, "w").write(str(os.getpid()))
print("Ray runtime started.", flush=True)
import signal
signal.pause()
' "$@"
FAKE
  cat >"${SITE}/venv/bin/python" <<'FAKE'
#!/usr/bin/env bash
if [[ "$1" == - ]]; then
  echo "python_version=3.11.7"
  for name in "${@:2}"; do
    [[ "${name}" != vllm ]] || continue
    echo "version.${name}=$(cat "${HOME}/version_${name}" 2>/dev/null || echo 1.0)"
  done
  exit
fi
# -c TEXT table | wait SECONDS NAME...
[[ "$3" != table || ! -e "${SITE}/job" ]] || echo '{"job": "01", "entrypoint": "train", "host": "h", "pid": 1}'
for file in "${SITE}"/alive_*; do
  kill -0 "$(cat "${file}")" 2>/dev/null || continue
  name="${file##*/alive_}"
  if [[ "$3" == wait ]]; then
    echo "{\"joined\": \"${name}\"}"
  else
    echo "{\"node\": \"${name}\", \"version\": \"2.60.0\", \"CPU\": [0, 2], \"GPU\": [0, 0], \"object_store_memory\": [0, 1]}"
  fi
done
FAKE
  # shellcheck disable=SC2016 # the fake expands these
  printf '#!/usr/bin/env bash\necho "doctor in $PWD with RAY_AUTH_MODE=${RAY_AUTH_MODE:-unset}: $*"\n' \
    >"${SITE}/venv/bin/verl-mixed"
  chmod +x "${SITE}"/bin/* "${SITE}"/venv/bin/*
}

# free_port FIRST: a port that no other test of this suite gets, and that the system gives to nobody: it is no ephemeral one.
free_port() {
  python3 - "$(($1 + BATS_SUITE_TEST_NUMBER))" <<'CODE'
import socket, sys
for port in int(sys.argv[1]), int(sys.argv[1]) + 500:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        continue  # another program has it
    print(port)
    break
CODE
}

# on HOST CMD...: run it as the host would.
on() {
  local host="$1"
  shift
  HOME="${SITE}/${host}" TMUX_TMPDIR="${SITE}/${host}/tmux" "$@"
}

# start_run SESSION: a run on the head in a tmux session, as run_mixed_training.sh makes it.
start_run() {
  echo "sleep 1000" >"${SITE}/${HEAD}/.verl_mixed/start.$1"
  on "${HEAD}" tmux new-session -d -s "$1" bash "${SITE}/${HEAD}/.verl_mixed/start.$1" \; \
    set-environment -t "=$1" VERL_MIXED_CLUSTER "${HEAD}" \; set-environment -t "=$1" VERL_MIXED_RUN "runs/${1#*training_}"
}

# pid_of NAME: of the node's Ray.
pid_of() { cat "${SITE}/alive_$1"; }

# ended PID: it is gone, or a zombie that tmux has not looked at.
ended() { ! grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$1/status"; }

# kill_node HOST NAME: its Ray, and the shell in its tmux session that would start it again.
kill_node() {
  kill -9 "$(on "$1" tmux list-panes -t "=$2:" -F '#{pane_pid}')" "$(pid_of "$2")"
}

is_up() { kill -0 "$(pid_of "$1")" 2>/dev/null; }

# end_site: whatever a test left.
end_site() {
  local file host
  for host in "${SITE}"/*/tmux; do
    TMUX_TMPDIR="${host}" tmux kill-server 2>/dev/null || true
  done
  for file in "${SITE}"/alive_*; do
    [[ ! -e "${file}" ]] || kill "$(cat "${file}")" 2>/dev/null || true
  done
  rm -rf "/tmp/vm_${HEAD}_"*
}

# calls WORD: how many recorded ssh calls hold this word.
calls() { grep -c -- "$1" "${CALLS}" || true; }
