#!/usr/bin/env bash
# Start, watch and end one Ray cluster over several hosts, from the jumphost.
#
# Usage: setup_cluster.sh COMMAND [HOST] [--hosts FILE] [--dry-run] [--yes] [--force] [--help]
#
#   setup          check every host, start the head and the workers, wait until they have joined; running nodes stay
#   status         one table of the nodes and their used resources; the dashboard's address
#   doctor [HOST]  the checks of `setup`, and `verl-mixed doctor` on the head; starts nothing
#   sync           copy this checkout to the hosts and make .venv there; refuses while a run uses another state of it
#   logs [HOST]    the last lines of Ray's output on the host; -f follows
#   attach [HOST]  open the host's tmux session (Ctrl-b d leaves it)
#   restart        stop and start the cluster; refuses while a run is active
#   cleanup        stop what `setup` started and remove its files, and nothing else; refuses while a run is active
#
# HOST is an address of the list, or head, node0, node1, ... (default: head)
#   --hosts FILE   the hosts and their settings, see config/cluster/hosts.example; replaces the two lists below
#   --dry-run      print every command, run none
#   --yes          ask nothing
#   --force        restart, cleanup: end an active run first, after a checkpoint if the run can save one
#   --fabric       doctor: measure the network between all nodes too (after `setup`)
#   --check        sync: copy nothing; exit 1 unless every host has the commit of this checkout
#
# Settings come from the environment, then the hosts file, then the block below, then what `setup` recorded in
# .cluster/<MASTER_IP>/. This machine needs bash, ssh and Python 3.10; the hosts need sshd, bash and tmux.
#
# Exit: 0 good, 1 a host failed or is not good, 2 a setting or the usage is wrong
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/remote.sh
source "${REPO_ROOT}/cluster/lib/remote.sh"

# --- settings; the environment overrides each ---------------------------------
# shellcheck disable=SC2034 # load_cluster reads them by name
{
  # frequently changed
  MASTER_IP=""    # the head node, as ssh reaches it from here
  WORKER_NODES=() # the workers: (10.0.0.2 10.0.0.3)
  CONDA_ENV=""    # conda environment on the hosts; empty: VENV
  WANDB_DIR=""    # where Weights & Biases writes on the head; empty: the run's folder

  # stable
  CONDA_PATH=""          # conda's folder on the hosts, or its bin/activate; empty: ~/miniconda3
  VENV=""                # virtual environment on the hosts; empty: REMOTE_REPO/.venv
  REMOTE_REPO=""         # this repository on the hosts; empty: the same path as here
  SHARED_DIRS=()         # folders that must be the same on every host, as of models and runs
  RAY_TEMP_DIR=""        # Ray's logs and sockets on every host, short; empty: /tmp/verl_mixed_ray_<user>
  RAY_PORT=""            # of the head; empty: 6379
  RAY_DASHBOARD_PORT=""  # of the head; empty: 8265
  RAY_DASHBOARD_HOST=""  # where the dashboard listens; empty: 127.0.0.1, reached by an ssh tunnel
  RAY_AUTH_MODE=""       # token or disabled (a closed network only); empty: token
  SSH_USER=""            # empty: as ssh decides
  SSH_PORT=""            # empty: as ssh decides
  SSH_KEY=""             # file of the private key; empty: as ssh decides
  SSH_OPTIONS=()         # more words for ssh: (-o StrictHostKeyChecking=accept-new)
  SSH_JUMP=""            # ProxyJump: user@bastion
  NUM_CPUS=""            # per node; empty: Ray counts them
  NUM_GPUS=""            # per node; empty: Ray counts them; a number is a logical resource (the laptop profile has 1)
  OBJECT_STORE_MEMORY="" # bytes per node; empty: Ray decides
  SETUP_COMMANDS=""      # shell commands before Ray on every host: module load cuda/12.4
  HOST_ENV=""            # variables of every host: NCCL_SOCKET_IFNAME=eth1 NCCL_DEBUG=WARN
  ENV_FORWARD=""         # names (patterns) of variables of this shell that the hosts get; empty: NCCL_* HF_* ... (docs/cluster.md)
  RAY_WORKER_PORTS=""    # pins every port of Ray's nodes: 20000-20999, and the 7 after it; empty: Ray chooses (docs/cluster.md)
  CONTAINER_IMAGE=""     # Ray and the run in a container of this image (docs/cluster.md); empty: without
  CONTAINER_ENGINE=""    # docker, podman or apptainer; empty: the first of them on the host
  CONTAINER_OPTIONS=()   # more words for the engine: (--ulimit memlock=-1 --device /dev/infiniband)
  HOSTS_FILE=""          # the same as --hosts FILE
}

START_TIMEOUT_S="${START_TIMEOUT_S:-90}" # for Ray to start on a host, and for all to join
STOP_GRACE_S="${STOP_GRACE_S:-20}"       # between SIGTERM and SIGKILL
SYNC_MAX_MB="${SYNC_MAX_MB:-64}"         # sync: larger files are not copied
RUN_GRACE_S="${RUN_GRACE_S:-900}"        # --force: for the run's step under way and its checkpoint

# --- on all hosts ---------------------------------------------------------------

# on_each FUNCTION HOST...: run `FUNCTION HOST` for all hosts in parallel. Exit codes go to RC[host], output to
# WORK/<i>.out and WORK/<i>.err.
declare -A RC=() SILENT=()
on_each() {
  local function="$1" host file
  local -A jobs=()
  shift
  for host in "$@"; do
    file="${WORK}/${HOST_INDEX[${host}]}"
    "${function}" "${host}" >"${file}.out" 2>"${file}.err" 9<&- &
    jobs["${host}"]=$!
  done
  for host in "$@"; do
    RC["${host}"]=0
    wait "${jobs[${host}]}" || RC["${host}"]=$?
    [[ "${DRY_RUN}" != 1 ]] || cat -- "${WORK}/${HOST_INDEX[${host}]}.err" >&2
  done
}

# workers_first FUNCTION: on all workers, then on the head, because a worker that drains its node asks the head.
workers_first() {
  ((${#HOST_NAMES[@]} == 1)) || on_each "$1" "${HOST_NAMES[@]:1}"
  on_each "$1" "${HOST_NAMES[0]}"
}

# out HOST, err HOST: the output of the last `on_each` for this host.
out() { cat -- "${WORK}/${HOST_INDEX[$1]}.out"; }
err() { cat -- "${WORK}/${HOST_INDEX[$1]}.err"; }

# failed HOST WHAT REMEDY: report the failure with the host's error output.
failed() {
  local said
  said="$(err "$1" | grep -v '^+ ' || true)"
  if ((RC["$1"] == 255)); then
    say "error: $1: no answer by ssh ($(tail -n 1 <<<"${said}")): $2; try '$(ssh_words "$1") true'"
  else
    say "error: $1: $2; $3"
    [[ -z "${said}" ]] || say "  ${said//$'\n'/$'\n'  }"
  fi
}

# ssh_words HOST: the ssh command to type by hand.
ssh_words() {
  local -n words="HOST_SSH_${HOST_INDEX[$1]}"
  local line
  printf -v line ' %q' "${words[@]}" "${HOST_TARGET[$1]}"
  ((${#words[@]} > 0)) || line=" ${HOST_TARGET[$1]}"
  printf 'ssh%s\n' "${line}"
}

# confirm QUESTION: ask, unless --yes was given. Without a terminal the script ends.
confirm() {
  local answer
  [[ "${YES}" != 1 && "${DRY_RUN}" != 1 ]] || return 0
  [[ -t 0 ]] || die 2 "$1 There is no terminal to ask: give --yes"
  read -r -p "$1 [y/N] " answer
  [[ "${answer}" == [yY]* ]] || die 1 "nothing was done"
}

# --- checks ---------------------------------------------------------------------

now_ns() {
  local now="${EPOCHREALTIME:-$(date +%s).000000}"
  printf '%s000\n' "${now//[.,]/}"
}

# here_state: commit, dirty flag and content hash of this checkout, in the format that `sync` writes.
here_state() {
  local commit="" dirty=0 content=""
  if commit="$(git -C "${REPO_ROOT}" rev-parse HEAD 2>/dev/null)"; then
    if [[ -n "$(git -C "${REPO_ROOT}" status --porcelain 2>/dev/null | head -n 1)" ]]; then
      dirty=1
    fi
  elif [[ -r "${REPO_ROOT}/.synced_commit" ]]; then
    grep -E '^(commit|dirty|content)=' "${REPO_ROOT}/.synced_commit"
    return
  fi
  if [[ "${dirty}" == 1 || -z "${commit}" ]]; then
    content="$(repository_files | (cd -- "${REPO_ROOT}" && xargs -0 cksum) | cksum | cut -d' ' -f1)"
  fi
  printf 'commit=%s\ndirty=%s\ncontent=%s\n' "${commit}" "${dirty}" "${content}"
}

probe_host() {
  local file="${WORK}/${HOST_INDEX[$1]}.probe"
  printf 'before_ns=%s\nnode=%s\nssh_command=%s\n' "$(now_ns)" "${HOST_SESSION[$1]}" "$(ssh_words "$1")" >"${file}"
  if node "$1" probe >>"${file}"; then
    printf 'after_ns=%s\n' "$(now_ns)" >>"${file}"
  else
    return 1
  fi
}

shared_write() { node "$1" shared write "${NONCE}"; }
shared_check() { node "$1" shared check "${NONCE}"; }

# check_shared HOST...: the first host writes a file into each of SHARED_DIRS; the other hosts must see the file.
check_shared() {
  local host file first="$1"
  NONCE="$$_${RANDOM}${RANDOM}"
  on_each shared_write "${first}"
  (($# == 1)) || on_each shared_check "${@:2}"
  for host in "$@"; do
    file="${WORK}/${HOST_INDEX[${host}]}.probe"
    if ((RC["${host}"] == 0)); then
      echo "shared=1" >>"${file}"
    else
      printf 'shared_error=%s\n' "$(out "${host}" | paste -sd, -)" >>"${file}"
    fi
  done
  node "${first}" shared remove "${NONCE}" || true
}

# check_hosts HOST...: print the table of checks. GOOD becomes the hosts without a bad finding. Returns 1 if a host has one.
check_hosts() {
  local host status=0
  local -a answered=() indexed=()
  say "checking $# hosts"
  on_each probe_host "$@"
  for host in "$@"; do
    if ((RC["${host}"] == 0)); then
      answered+=("${host}")
    elif [[ "${DRY_RUN}" != 1 ]]; then
      ((RC["${host}"] != 255)) || SILENT["${host}"]=1
      printf 'ssh_error=%s\n' "$(err "${host}" | tail -n 1)" >>"${WORK}/${HOST_INDEX[${host}]}.probe"
    fi
  done
  # shellcheck disable=SC2128 # load_cluster made one string of the list
  if [[ -n "${SHARED_DIRS}" ]] && ((${#answered[@]} > 0)); then
    check_shared "${answered[@]}"
  fi
  GOOD=("$@")
  [[ "${DRY_RUN}" != 1 ]] || return 0
  here_state >"${WORK}/here.probe"
  for host in "$@"; do
    indexed+=("${HOST_INDEX[${host}]}=${host}")
  done
  compute verl_mixed.checks.hosts "${WORK}" "${indexed[@]}" || status=$?
  ((status <= 1)) || die 1 "the checks themselves failed (see above)"
  mapfile -t GOOD <"${WORK}/good"
  return "${status}"
}

# --- setup ----------------------------------------------------------------------

# alone: take a lock, so that one command at a time changes hosts from this checkout. The lock ends with this script.
alone() {
  local wait_for='import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1] == "now" else 0))
except BlockingIOError:
    sys.exit(1)
except OSError:
    pass  # a file system without locks'
  [[ "${DRY_RUN}" != 1 ]] || return 0
  exec 9<"${REPO_ROOT}"
  "${JUMPHOST_PYTHON}" -c "${wait_for}" now || {
    say "another setup_cluster.sh of this checkout is running: waiting for its end"
    "${JUMPHOST_PYTHON}" -c "${wait_for}" later
  }
}

# make_token: make Ray's token once per cluster. The token is never in an argument or in a log.
make_token() {
  local file="${CLUSTER_RECORD}/token"
  NODE_SECRET=""
  [[ "${RAY_AUTH_MODE}" == token ]] || return 0
  if [[ "${DRY_RUN}" == 1 ]]; then
    say "+ (umask 077; mkdir -p -- ${CLUSTER_RECORD@Q}; [[ -s ${file@Q} ]] ||" \
      "${JUMPHOST_PYTHON} -c 'import secrets; print(secrets.token_hex(32), end=\"\")' >${file@Q})"
    return
  fi
  if [[ ! -s "${file}" ]]; then
    (umask 077 && mkdir -p -- "${CLUSTER_RECORD}" &&
      "${JUMPHOST_PYTHON}" -c 'import secrets; print(secrets.token_hex(32), end="")' >"${file}") ||
      die 1 "cannot write ${file}: check the folder's permissions and the disk"
  fi
  NODE_SECRET="$(<"${file}")"
}

# collect_environment: NODE_ENVIRONMENT becomes the variables that ENV_FORWARD names, a line each; those that an earlier
# `setup` recorded stay where this shell has none.
collect_environment() {
  local file="${CLUSTER_RECORD}/environment"
  NODE_ENVIRONMENT="$({
    cat -- "${file}" 2>/dev/null || true
    forwarded_lines
  } | awk '
    /^export [A-Za-z_]/ { name = $2; sub(/=.*/, "", name); if (!(name in line)) order[++n] = name }
    { line[name] = /^export [A-Za-z_]/ ? $0 : line[name] "\n" $0 }
    END { for (i = 1; i <= n; i++) print line[order[i]] }')"
  [[ "${DRY_RUN}" != 1 ]] || {
    say "the variables of this shell that the hosts get (ENV_FORWARD):"
    show_forwarded
    return
  }
  [[ -n "${NODE_ENVIRONMENT}" ]] || return 0
  (umask 077 && mkdir -p -- "${CLUSTER_RECORD}" && printf '%s\n' "${NODE_ENVIRONMENT}" >"${file}") ||
    die 1 "cannot write ${file}: check the folder's permissions and the disk"
}

# record: save hosts and settings for the other commands and for run_mixed_training.sh.
record() {
  if [[ "${DRY_RUN}" == 1 ]]; then
    say "+ (umask 077; mkdir -p -- ${CLUSTER_RECORD@Q})"
    say "+ (umask 077; printf %s $(printf %q "${RECORD_HOSTS}") >${CLUSTER_RECORD@Q}/hosts)"
    say "+ (umask 077; printf %s $(printf %q "${RECORD_SETTINGS}") >${CLUSTER_RECORD@Q}/settings.env)"
    return
  fi
  (umask 077 && mkdir -p -- "${CLUSTER_RECORD}" && printf '%s' "${RECORD_HOSTS}" >"${CLUSTER_RECORD}/hosts" &&
    printf '%s' "${RECORD_SETTINGS}" >"${CLUSTER_RECORD}/settings.env") ||
    die 1 "cannot write ${CLUSTER_RECORD}: check the folder's permissions and the disk"
}

start_host() { node "$1" start "${START_TIMEOUT_S}"; }

stop_host() { node "$1" stop "${STOP_GRACE_S}"; }

# start_worker: with a new head, a worker's old Ray belongs to no cluster, so it is stopped first.
start_worker() {
  [[ "${HEAD_SAID}" == "up already" ]] || stop_host "$1" || return
  start_host "$1"
}

wait_for_nodes() { node "$1" ray-nodes wait "${START_TIMEOUT_S}" "${WAIT_FOR[@]}"; }

setup() {
  local began="${SECONDS}" host head="${HOST_NAMES[0]}" status=0 joined=0
  local -a workers=() started=()
  name_left_out || true
  check_hosts "${HOST_NAMES[@]}" || status=1
  if [[ " ${GOOD[*]} " != *" ${head} "* ]]; then
    die 1 "${head}: the head is not good (see above): nothing was started; mend it and run setup again"
  fi
  for host in "${HOST_NAMES[@]}"; do
    [[ " ${GOOD[*]} " == *" ${host} "* ]] || say "error: ${host}: left out (see above); mend it and run setup again"
  done
  make_token
  collect_environment

  on_each start_host "${head}"
  ((RC["${head}"] == 0)) || {
    failed "${head}" "the head did not start" "see './setup_cluster.sh logs head'"
    exit 1
  }
  record
  HEAD_SAID="$(out "${head}")"
  [[ "${DRY_RUN}" == 1 ]] || say "${head}: head: ${HEAD_SAID} (session head)"

  for host in "${GOOD[@]}"; do
    [[ "${host}" == "${head}" ]] || workers+=("${host}")
  done
  ((${#workers[@]} == 0)) || on_each start_worker "${workers[@]}"
  WAIT_FOR=(head)
  started=("${head}")
  for host in "${workers[@]}"; do
    if ((RC["${host}"] != 0)); then
      failed "${host}" "the worker did not start" "see './setup_cluster.sh logs ${HOST_SESSION[${host}]}'"
      status=1
      continue
    fi
    [[ "${DRY_RUN}" == 1 ]] || say "${host}: worker: $(out "${host}") (session ${HOST_SESSION[${host}]})"
    WAIT_FOR+=("${HOST_SESSION[${host}]}")
    started+=("${host}")
  done

  on_each wait_for_nodes "${head}"
  [[ "${DRY_RUN}" != 1 ]] || return 0
  for host in "${started[@]}"; do
    if out "${head}" | grep "\"${HOST_SESSION[${host}]}\"" >/dev/null; then
      joined=$((joined + 1))
    else
      say "error: ${host}: not in the head's list of nodes after ${START_TIMEOUT_S} s:" \
        "see './setup_cluster.sh logs ${HOST_SESSION[${host}]}', then './setup_cluster.sh restart'"
      status=1
    fi
  done
  ((joined > 0)) || failed "${head}" "the head's Ray does not answer" "see './setup_cluster.sh logs head'"
  echo
  show_status || status=1
  echo "setup: ${joined} of ${#HOST_NAMES[@]} nodes joined in $((SECONDS - began)) s"
  ((status != 0)) || say_next
  return "${status}"
}

# say_next: print the command that starts a run on this cluster. Where several are recorded, it names this one.
say_next() {
  local -a records=("${REPO_ROOT}"/.cluster/*/hosts)
  local choice="MASTER_IP=${MASTER_IP} "
  ((${#records[@]} > 1)) || choice=""
  echo "next: ${choice}./run_mixed_training.sh (its settings are at its top)"
}

# --- status, logs, attach, doctor -----------------------------------------------

# status_of HOST: a host that did not answer the checks of `setup` is not asked again.
status_of() {
  [[ -z "${SILENT["$1"]:-}" ]] || return 255
  node "$1" status
}
ray_table() { node "$1" ray-nodes table; }

show_status() {
  local host changed head="${HOST_NAMES[0]}" status=0
  on_each status_of "${HOST_NAMES[@]}"
  for host in "${HOST_NAMES[@]}"; do
    ((RC["${host}"] == 0)) || [[ -n "${SILENT["${host}"]:-}" ]] ||
      failed "${host}" "no status" "see './setup_cluster.sh doctor ${HOST_SESSION[${host}]}'"
    out "${host}" >"${WORK}/${HOST_INDEX[${host}]}.status"
    changed="$(sed -n 's/^changed=//p' "${WORK}/${HOST_INDEX[${host}]}.status")"
    [[ -z "${changed}" ]] || {
      say "error: ${host}: Ray is up with another ${changed}: run './setup_cluster.sh restart', or take back what was changed"
      status=1
    }
  done
  : >"${WORK}/ray.jsonl"
  if ((RC["${head}"] == 0)); then
    on_each ray_table "${head}"
    ((RC["${head}"] == 0)) || failed "${head}" "Ray does not answer" "run './setup_cluster.sh setup' (or logs head)"
    out "${head}" >"${WORK}/ray.jsonl"
  fi
  [[ "${DRY_RUN}" != 1 ]] || return 0
  compute cluster.node_table "${WORK}" "${HOST_NAMES[@]}" || status=1
  show_dashboard
  return "${status}"
}

show_dashboard() {
  local head="${HOST_NAMES[0]}" port="${RAY_DASHBOARD_PORT}" command
  command="$(ssh_words "${head}")"
  echo "dashboard: http://127.0.0.1:${port} through: ssh -N -L ${port}:127.0.0.1:${port}${command#ssh}"
  case "${RAY_DASHBOARD_HOST}" in
    127.* | ::1) ;;
    *) echo "dashboard: it listens on ${RAY_DASHBOARD_HOST}, so also at http://${HOST_IP[${head}]}:${port}" ;;
  esac
  [[ "${RAY_AUTH_MODE}" != token ]] || echo "dashboard: it asks for the token in ${CLUSTER_RECORD}/token"
}

status() { show_status; }

logs() {
  local host
  host="$(host_named "${HOST:-head}")" || exit
  node "${host}" logs "$([[ "${FOLLOW}" == 1 ]] && echo follow || echo once)" ||
    die 1 "${host}: no logs; try '$(ssh_words "${host}") true'"
}

attach() {
  local host
  host="$(host_named "${HOST:-head}")" || exit
  remote_tty "${host}" tmux attach -t "=${HOST_SESSION[${host}]}" ||
    die 1 "${host}: cannot attach to tmux session ${HOST_SESSION[${host}]}: see './setup_cluster.sh status'"
}

doctor() {
  local host head="${HOST_NAMES[0]}" status=0
  local -a hosts=("${HOST_NAMES[@]}")
  if [[ -n "${HOST}" ]]; then
    host="$(host_named "${HOST}")" || exit
    hosts=("${head}") # the checks compare every host with the head
    [[ "${host}" == "${head}" ]] || hosts+=("${host}")
  fi
  check_hosts "${hosts[@]}" || status=1
  if [[ " ${GOOD[*]} " == *" ${head} "* ]]; then
    say "verl-mixed doctor on ${head}:"
    node "${head}" doctor ${FABRIC:+"${FABRIC}"} || status=1
  fi
  return "${status}"
}

# --- restart, cleanup -----------------------------------------------------------

# is_run_active: GOING becomes what goes on there, in words. A head that does not answer has no run that could be seen.
is_run_active() {
  local head="${HOST_NAMES[0]}"
  GOING=""
  on_each status_of "${head}"
  [[ "${DRY_RUN}" != 1 ]] && ((RC["${head}"] == 0)) || return 1
  GOING="$(out "${head}" | sed -n "s/^run=\(ours_alive\|foreign\) \(.*\)/tmux session \2 is running on ${head}/p" | head -n 1)"
  if [[ -z "${GOING}" ]] && out "${head}" | grep -x 'session=ours_alive' >/dev/null; then
    on_each ray_table "${head}"
    ((RC["${head}"] != 0)) || GOING="$(out "${head}" | sed -n 's/^{"job"/a job of Ray runs: &/p' | head -n 1)"
  fi
  [[ -n "${GOING}" ]]
}

# no_run: refuse while a run is active; with --force, end the run.
no_run() {
  local head="${HOST_NAMES[0]}"
  is_run_active || [[ "${DRY_RUN}" == 1 && "${FORCE}" == 1 ]] || return 0
  [[ "${FORCE}" == 1 ]] ||
    die 1 "a run goes on (${GOING}): end it with './run_mixed_training.sh stop', or give --force to end it here"
  say "${head}: ending the run, which saves a checkpoint first (up to ${RUN_GRACE_S} s: RUN_GRACE_S)"
  node "${head}" stop-run "${RUN_GRACE_S}" || say "${head}: it is ended with its node"
}

cleanup_host() { node "$1" cleanup "${STOP_GRACE_S}"; }

# name_left_out: warn of hosts that `setup` recorded and that the list does not name now. Returns 1 if there are any.
name_left_out() {
  ((${#LEFT_OUT[@]} > 0)) || return 0
  say "warning: ${LEFT_OUT[*]}: set up as worker, and no longer in the list of hosts: its Ray is left as it is;" \
    "'WORKER_NODES=\"${RECORDED_WORKERS}\" ./setup_cluster.sh cleanup' ends it"
  return 1
}

restart() {
  local host status=0
  confirm "Stop Ray on ${#HOST_NAMES[@]} hosts (${HOST_NAMES[*]}) and start it again?"
  no_run
  workers_first stop_host
  for host in "${HOST_NAMES[@]}"; do
    ((RC["${host}"] == 0)) || [[ "${DRY_RUN}" == 1 ]] || failed "${host}" "did not stop" "see the words below" || true
  done
  setup || status=$?
  return "${status}"
}

cleanup() {
  local host status=0
  confirm "Stop the cluster on ${#HOST_NAMES[@]} hosts (${HOST_NAMES[*]}) and remove what it left there?"
  no_run
  workers_first cleanup_host
  for host in "${HOST_NAMES[@]}"; do
    if ((RC["${host}"] == 0)); then
      [[ "${DRY_RUN}" == 1 ]] || say "${host}: clean"
    else
      failed "${host}" "not cleaned" "run cleanup again when it answers"
      status=1
    fi
  done
  name_left_out || status=1
  if ((status == 0)); then
    run rm -rf -- "${CLUSTER_RECORD}"
    [[ "${DRY_RUN}" == 1 ]] || rmdir -- "${REPO_ROOT}/.cluster" 2>/dev/null || true
  else
    say "the record ${CLUSTER_RECORD} is kept, so that cleanup can be run again"
  fi
  return "${status}"
}

# --- sync -----------------------------------------------------------------------

# repository_files: the files to copy, NUL after each: what git does not ignore, or all but results and environments.
repository_files() {
  local file
  if git -C "${REPO_ROOT}" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git -C "${REPO_ROOT}" ls-files -co --exclude-standard -z | while IFS= read -r -d '' file; do
      [[ ! -f "${REPO_ROOT}/${file}" ]] || printf '%s\0' "${file}"
    done
  else
    (cd -- "${REPO_ROOT}" && find . \( -name .git -o -name __pycache__ -o -path ./.venv -o -path './.venv.*' \
      -o -path ./runs -o -path ./logs -o -path ./data -o -path ./.cluster -o -path './.synced_*' \) -prune -o -type f -printf '%P\0')
  fi | LC_ALL=C sort -z -u
}

# left_behind FILE: what is not copied, whatever git says: secrets, data, and files over SYNC_MAX_MB.
left_behind() {
  local size
  case "$1" in
    .env | .env.* | */.env | */.env.* | data/*) return 0 ;;
  esac
  size="$(stat -c %s -- "${REPO_ROOT}/$1")"
  ((size > SYNC_MAX_MB << 20)) || return 1
  say "warning: not copied, ${size} bytes (SYNC_MAX_MB=${SYNC_MAX_MB}): $1"
}

# copy_to HOST HOW: the files of WORK/files and what `sync` notes. HOW is rsync, which sends only what changed, where the
# host has it; else tar, which also passes a login shell that prints something.
copy_to() {
  local target="${HOST_TARGET[$1]}:${HOST_REPO[$1]}/"
  local -a copy=(rsync -a)
  ssh_command "$1"
  copy+=(-e "${SSH_COMMAND[*]@Q}")
  if [[ "$2" == rsync ]] && command -v rsync >/dev/null; then
    run "${copy[@]}" --files-from="${WORK}/files" --from0 "${REPO_ROOT}/" "${target}" >&2 &&
      run "${copy[@]}" "${WORK}/.synced_files.new" "${WORK}/.synced_commit.new" "${target}" >&2 && return
    say "$1: rsync failed (see above): copying with tar"
  fi
  if [[ "${DRY_RUN}" == 1 ]]; then
    say "+ (cd -- ${REPO_ROOT@Q} && git ls-files -co --exclude-standard -z | LC_ALL=C sort -z >.synced_files.new &&" \
      "git rev-parse HEAD | sed s/^/commit=/ >.synced_commit.new &&" \
      "tar --null -T .synced_files.new -czf - .synced_files.new .synced_commit.new) |" \
      "$(ssh_words "$1") $(printf %q "tar -xzf - -C ${HOST_REPO[$1]@Q}")"
  else
    tar -C "${REPO_ROOT}" --null -T "${WORK}/files" -czf - -C "${WORK}" .synced_files.new .synced_commit.new |
      remote_stdin "$1" tar -xzf - -C "${HOST_REPO[$1]}" >&2 # what a .bashrc there prints is no result
  fi
}

sync_host() {
  local wanted="wanted tar"
  if [[ "${DRY_RUN}" == 1 ]]; then
    node "$1" sync-state NONCE
  else
    wanted="$(node "$1" sync-state "${NONCE}")" || return
  fi
  if [[ "${wanted}" == wanted* ]]; then
    copy_to "$1" "${wanted#wanted }" || return
    node "$1" sync-finish || return
  fi
  node "$1" make-venv || return
  case "${wanted}" in
    wanted*) echo "copied to ${HOST_REPO[$1]}" ;;
    same) echo "${HOST_REPO[$1]} is this folder" ;;
    done) echo "${HOST_REPO[$1]} is shared with another host" ;;
  esac
}

repo_state_of() { node "$1" repo-state; }

# state_words FILE: the commit of a state, and whether files differ from it.
state_words() {
  local commit content
  commit="$(sed -n 's/^commit=//p' "$1")"
  content="$(sed -n 's/^content=//p' "$1")"
  printf '%s%s\n' "${commit:0:12}" "${content:++changes}"
}

# same_code: whether every host has the commit of this checkout; says which has not. In a clone of its own, files may differ
# from the commit, as the settings blocks here do.
same_code() {
  local host status=0 what="$1"
  here_state >"${WORK}/here"
  on_each repo_state_of "${HOST_NAMES[@]}"
  [[ "${DRY_RUN}" != 1 ]] || return 0
  for host in "${HOST_NAMES[@]}"; do
    out "${host}" >"${WORK}/there"
    if ((RC["${host}"] != 0)); then
      failed "${host}" "its code is not known" "see the words below"
      status=1
    elif [[ "${what}" == commit ]]; then
      grep -qxF -- "$(grep '^commit=' "${WORK}/here")" "${WORK}/there" && continue
      say "${host}: has $(state_words "${WORK}/there"), here is $(state_words "${WORK}/here")"
      status=1
    else
      cmp -s <(grep -E '^(commit|content)=' "${WORK}/there") <(grep -E '^(commit|content)=' "${WORK}/here") || status=1
    fi
  done
  return "${status}"
}

sync() {
  local host file status=0
  if ((CHECK)); then
    same_code commit ||
      die 1 "the hosts have not all the commit of this checkout (see above): update them with git, or 'sync' copies it"
    [[ "${DRY_RUN}" == 1 ]] || say "every host has the commit of this checkout"
    return
  fi
  if is_run_active; then
    same_code state && {
      say "a run goes on, and every host has this code already: nothing is copied"
      return
    }
    die 1 "a run goes on (${GOING}), and this checkout differs from what the hosts have: nothing is copied under it; wait" \
      "for its end, or give --no-sync to a start that takes what is there"
  fi
  NONCE="$$_${RANDOM}${RANDOM}"
  if [[ "${DRY_RUN}" != 1 ]]; then
    repository_files | while IFS= read -r -d '' file; do
      left_behind "${file}" || printf '%s\0' "${file}"
    done >"${WORK}/files"
    cp -- "${WORK}/files" "${WORK}/.synced_files.new"
    here_state >"${WORK}/.synced_commit.new"
    echo "sync=${NONCE}" >>"${WORK}/.synced_commit.new"
    mkdir -p -- "${REPO_ROOT}/.cluster"
    echo "${NONCE}" >"${REPO_ROOT}/.cluster/sync_nonce"
  fi
  # the head first: hosts that share the folder with it then find it done
  on_each sync_host "${HOST_NAMES[0]}"
  ((${#HOST_NAMES[@]} == 1)) || on_each sync_host "${HOST_NAMES[@]:1}"
  [[ "${DRY_RUN}" == 1 ]] || rm -f -- "${REPO_ROOT}/.cluster/sync_nonce"
  [[ "${DRY_RUN}" == 1 ]] || rmdir -- "${REPO_ROOT}/.cluster" 2>/dev/null || true
  for host in "${HOST_NAMES[@]}"; do
    if ((RC["${host}"] != 0)); then
      failed "${host}" "not synced" "see the words below"
      status=1
    elif [[ "${DRY_RUN}" != 1 ]]; then
      say "${host}: $(out "${host}")"
    fi
  done
  return "${status}"
}

# --- main -----------------------------------------------------------------------

main() {
  local command="" name
  DRY_RUN="${DRY_RUN:-0}" YES=0 FORCE=0 FOLLOW=0 CHECK=0 FABRIC="" HOST=""
  while (($# > 0)); do
    case "$1" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      --dry-run) DRY_RUN=1 ;;
      --yes | -y) YES=1 ;;
      --force) FORCE=1 ;;
      --check) CHECK=1 ;;
      --fabric) FABRIC=--fabric ;;
      -f | --follow) FOLLOW=1 ;;
      --hosts)
        (($# > 1)) || die 2 "--hosts needs a file: see --help"
        FROM_ENVIRONMENT[HOSTS_FILE]="$2"
        shift
        ;;
      --hosts=*) FROM_ENVIRONMENT[HOSTS_FILE]="${1#*=}" ;;
      -*) die 2 "unknown option $1: see --help" ;;
      setup | status | restart | cleanup | logs | attach | doctor | sync)
        if [[ -z "${command}" ]]; then command="$1"; else HOST="$1"; fi
        ;;
      *)
        [[ -n "${command}" ]] || die 2 "unknown command '$1': one of setup, status, doctor, sync, logs, attach, restart," \
          "cleanup; see --help"
        [[ -z "${HOST}" ]] || die 2 "one HOST, not '${HOST}' and '$1': see --help"
        HOST="$1"
        ;;
    esac
    shift
  done
  [[ -n "${command}" ]] || die 2 "no command: setup, status, doctor, sync, logs, attach, restart or cleanup; see --help"
  case "${command}" in
    logs | attach | doctor) ;;
    *) [[ -z "${HOST}" ]] || die 2 "${command} takes no HOST ('${HOST}'): it is for all hosts; see --help" ;;
  esac
  [[ -z "${FABRIC}" || "${command}" == doctor ]] || die 2 "--fabric is for doctor only, not ${command}: see --help"
  for name in START_TIMEOUT_S STOP_GRACE_S SYNC_MAX_MB RUN_GRACE_S; do
    [[ "${!name}" =~ ^[0-9]{1,6}$ ]] || die 2 "${name}=${!name}: want a whole number"
  done
  ((CHECK == 0)) || [[ "${command}" == sync ]] || die 2 "--check is for sync only, not ${command}: see --help"
  check_block "${BASH_SOURCE[0]}" "${SETTINGS[@]}"
  load_cluster
  [[ "${DRY_RUN}" != 1 ]] || show_node_texts
  case "${command}" in
    setup | restart | cleanup | sync) alone ;;
  esac
  "${command}"
}

main "$@"
