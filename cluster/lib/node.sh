# shellcheck shell=bash
# The commands that run on one host of the cluster. cluster/lib/remote.sh sends this text to `bash -s -- SUBCOMMAND` on
# the host, preceded by assignments (CLUSTER_ID, NODE_NAME, NODE_IP, ...; cluster/inventory.py, node_settings) and by
# keep_up.sh, container.sh and ports.sh. So the host needs only bash and tmux. Results go to stdout, mostly as key=value
# lines; messages go to stderr.
#
# These things belong to us, and nothing else is touched:
#   - tmux sessions with VERL_MIXED_CLUSTER in their tmux environment, and in them the panes that run our start scripts;
#   - the processes of those panes, and their children: by VERL_MIXED_NODE in their environment, which only our start
#     scripts set, by the kernel session of the pane, and by a log below RAY_TEMP_DIR that is open for writing (Ray
#     overwrites the environment of some of its processes, but each of them writes its log there);
#   - the folder RAY_TEMP_DIR, if it holds our mark.
# shellcheck disable=SC2154 # the assignments come before this text
# shellcheck disable=SC2016 # these are expanded later, when a shell sources the file `env`
set -euo pipefail
umask 077

# Each host has its own folder and mark, named by its address, because all hosts may share one home folder, and because
# node1 becomes node0 when the list of hosts changes.
STATE="${HOME}/.verl_mixed/${CLUSTER_ID}"
[[ "${NODE_NAME}" == head ]] || STATE+=".${NODE_IP}"
: "${RAY_TEMP_DIR:=/tmp/verl_mixed_ray_$(id -un)}"
: "${CONDA_PATH:=${HOME}/miniconda3}"
# the folder of conda, also where its activation script is given, or a link to that as in /etc/profile.d
[[ ! -f "${CONDA_PATH}" ]] || CONDA_PATH="$(readlink -f -- "${CONDA_PATH}")"
CONDA_PATH="${CONDA_PATH%/bin/activate}"
CONDA_PATH="${CONDA_PATH%/etc/profile.d/conda.sh}"
MARK="${CLUSTER_ID}/${NODE_IP}"
RUN_SESSIONS=verl_training # and verl_training_<run>

words() { printf '%s\n' "$*" >&2; }

# within SECONDS CONDITION...: wait until the condition is true; returns 1 after SECONDS.
within() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.2
  done
}

# --- tmux -----------------------------------------------------------------------

# session_state NAME: none, foreign, ours_alive or ours_dead.
session_state() {
  local mark dead
  tmux has-session -t "=$1" 2>/dev/null || { echo none && return; }
  mark="$(tmux show-environment -t "=$1" VERL_MIXED_CLUSTER 2>/dev/null || true)"
  [[ "${mark}" == "VERL_MIXED_CLUSTER=${CLUSTER_ID}" ]] || { echo foreign && return; }
  dead="$(tmux list-panes -s -t "=$1" -F '#{pane_dead}' 2>/dev/null | sort -n | head -n 1)"
  [[ "${dead}" == 0 ]] && echo ours_alive || echo ours_dead
}

our_sessions() {
  local name
  while read -r name; do
    case "$(session_state "${name}")" in
      ours_*) printf '%s\n' "${name}" ;;
    esac
  done < <(tmux list-sessions -F '#{session_name}' 2>/dev/null || true)
}

# other_role: the other session name under which Ray of this cluster runs on this host, if any.
other_role() {
  local name
  for name in $(our_sessions); do
    [[ "${name}" =~ ^(head|node[0-9]+)$ && "${name}" != "${NODE_NAME}" ]] || continue
    [[ "$(session_state "${name}")" != ours_alive ]] || printf '%s\n' "${name}"
  done
}

# last_lines NAME: the text of a pane, without empty lines.
last_lines() {
  tmux capture-pane -p -J -S -200 -t "=$1:" 2>/dev/null | sed -e '/^[[:space:]]*$/d' | tail -n "${2:-15}" || true
}

# --- processes ------------------------------------------------------------------

# not_own PID: the process is neither this shell nor one of its ancestors.
not_own() {
  local pid=$$
  while ((pid > 1)); do
    [[ "${pid}" != "$1" ]] || return 1
    read_stat "${pid}" || return 0
    STAT="${STAT#* }"
    pid="${STAT%% *}"
  done
}

# our_panes NAME: the process ids of the panes that our start scripts run in; a pane that a user split off is no such pane.
our_panes() {
  tmux list-panes -s -t "=$1" -F '#{pane_pid} #{pane_start_command}' 2>/dev/null |
    sed -n 's|^\([0-9]*\) .*/\.verl_mixed/.*|\1|p' || true
}

# writers PATTERN...: processes with a file open for writing whose path matches one of the patterns.
writers() {
  local pattern fd flags
  local -a names=()
  for pattern in "$@"; do
    names+=(-o -lname "${pattern}")
  done
  while IFS= read -r fd; do
    flags="$(sed -n 's/^flags:[[:space:]]*//p' "${fd/%\/fd\/*/}/fdinfo/${fd##*/}" 2>/dev/null)" || continue
    ((8#${flags:-0} % 4 == 0)) || printf '%s\n' "${fd}" # O_RDONLY is 0
  done < <(find /proc/[0-9]*/fd -maxdepth 1 \( "${names[@]:1}" \) 2>/dev/null || true)
}

our_processes() {
  local pid
  local -a sids=()
  local name
  for name in $(our_sessions); do
    mapfile -t -O "${#sids[@]}" sids < <(our_panes "${name}")
  done
  {
    grep -lzFx -e "VERL_MIXED_NODE=${MARK}" /proc/[0-9]*/environ 2>/dev/null || true
    # the same path in another container or network namespace is another node
    writers "${RAY_TEMP_DIR}/session_*" "$(started_in)/session_*"
    in_sessions "${sids[@]}"
  } | sed -E 's|^/proc/([0-9]+)/.*|\1|' | sort -un | while read -r pid; do
    if [[ -O "/proc/${pid}" && "/proc/${pid}/ns/net" -ef /proc/self/ns/net ]] && not_own "${pid}"; then
      printf '%s\n' "${pid}"
    fi
  done
}

# have_ended PID...: each process is gone or a zombie. Zombies count, because a tmux server that misses a signal does not
# reap them.
have_ended() {
  local pid
  for pid in "$@"; do
    read_stat "${pid}" || continue
    [[ "${STAT}" == Z* ]] || return 1
  done
}

none_of_ours() { [[ -z "$(our_processes)" ]]; }

# listening PORT: some process of this host listens there.
listening() {
  local port
  printf -v port '%04X' "$1"
  awk -v port=":${port}" '$4 == "0A" && substr($2, length($2) - 4) == port { found = 1 } END { exit !found }' \
    /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

# --- the Python environment -----------------------------------------------------

conda_bin() {
  local folder
  if [[ "${CONDA_ENV}" == /* ]]; then
    printf '%s/bin\n' "${CONDA_ENV}"
  elif [[ "${CONDA_ENV}" == base ]]; then
    printf '%s/bin\n' "${CONDA_PATH}"
  else
    for folder in "${CONDA_PATH}/envs" "${HOME}/.conda/envs"; do
      [[ ! -x "${folder}/${CONDA_ENV}/bin/python" ]] || break
    done
    printf '%s/%s/bin\n' "${folder}" "${CONDA_ENV}"
  fi
}

env_bin() {
  if [[ -n "${CONTAINER_IMAGE}" ]]; then
    printf '%s/bin\n' "${STATE}" # programs that start a container
  elif [[ -n "${CONDA_ENV}" ]]; then conda_bin; else printf '%s/bin\n' "${VENV}"; fi
}

env_lines() {
  # first, so that conda and PATH of these commands are found below; they may fail and read unset variables
  [[ -z "${SETUP_COMMANDS}" ]] ||
    printf '_flags="$(set +o)"; set +eu\n%s\neval "${_flags}"; unset _flags\n' "${SETUP_COMMANDS}"
  [[ -z "${NODE_ENVIRONMENT:-}" ]] || printf '%s\n' "${NODE_ENVIRONMENT}"
  if [[ -n "${CONDA_ENV}" ]]; then
    printf '_flags="$(set +o)"; set +eu # conda reads unset variables\n'
    printf 'if . %q/etc/profile.d/conda.sh 2>/dev/null; then conda activate %q; fi\n' "${CONDA_PATH}" "${CONDA_ENV}"
    printf 'eval "${_flags}"; unset _flags\n'
  elif [[ -z "${CONTAINER_IMAGE}" ]]; then
    printf 'export VIRTUAL_ENV=%q\n' "${VENV}"
  fi
  printf 'case "${PATH}" in %q:*) ;; *) export PATH=%q:"${PATH}" ;; esac\n' "$(env_bin)" "$(env_bin)"
  printf 'unset PYTHONHOME\n'
  printf 'export PYTHONPATH=%q"${PYTHONPATH:+:${PYTHONPATH}}"\n' "${REMOTE_REPO}"
  printf 'export VERL_MIXED_CLUSTER=%q\n' "${CLUSTER_ID}"
  printf 'export RAY_AUTH_MODE=%q\n' "${RAY_AUTH_MODE}"
  if [[ "${RAY_AUTH_MODE}" == token ]]; then
    printf 'unset RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN_PATH=%q\n' "${STATE}/token"
  else
    printf 'unset RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH\n'
  fi
  printf 'export MASTER_IP=%q RAY_PORT=%q RAY_ADDRESS=%q\n' "${HEAD_IP}" "${RAY_PORT}" "${HEAD_ADDRESS}"
  printf 'export WORKER_NODES=%q\n' "${WORKER_NODES}"
  printf 'export RAY_TEMP_DIR=%q RAY_DASHBOARD_PORT=%q\n' "${RAY_TEMP_DIR}" "${RAY_DASHBOARD_PORT}"
  printf 'export ENV_FORWARD=%q\n' "${ENV_FORWARD}"
  [[ -z "${WANDB_DIR}" ]] || printf 'export WANDB_DIR=%q\n' "${WANDB_DIR}"
  printf 'if [ -d %q ]; then export TMPDIR=%q; fi\n' "${RAY_TEMP_DIR}/tmp" "${RAY_TEMP_DIR}/tmp" # cleanup removes it
  printf 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1\n'
  [[ -z "${HOST_ENV}" ]] || exported_words "${HOST_ENV}" # of this host, so it wins
}

# exported_words WORDS: `export NAME=VALUE` for shell words, as a hosts file has them.
exported_words() {
  local word
  local -a words
  # cluster/inventory.py has checked that they are NAME=VALUE
  mapfile -t words < <(xargs -r -n 1 printf '%s\n' <<<"$1")
  for word in "${words[@]}"; do
    printf 'export %s=%q\n' "${word%%=*}" "${word#*=}"
  done
}

# --- subcommands ----------------------------------------------------------------

# dir_state FOLDER: none, empty, ours or foreign. Everybody can know the mark, so folder, link to it and mark must be this
# user's; and nobody may be able to put another folder in its place.
dir_state() {
  local mark="$1/.verl_mixed_cluster"
  if [[ -n "$(find -H "$(dirname -- "$1")" -maxdepth 0 -perm -o+w ! -perm -1000 2>/dev/null)" ]]; then
    echo foreign
  elif [[ ! -e "$1" && ! -L "$1" ]]; then
    echo none
  elif [[ ! -d "$1" || ! -O "$1" || "$(stat -c %u -- "$1")" != "${EUID}" ]]; then
    echo foreign
  elif [[ -f "${mark}" && ! -L "${mark}" && -O "${mark}" && "$(cat -- "${mark}")" == "${MARK}" ]]; then
    echo ours
  elif [[ -z "$(ls -A -- "$1" 2>/dev/null)" ]]; then
    echo empty
  else
    echo foreign
  fi
}

# started_with: the settings that Ray cannot change while it runs, one per line.
started_with() {
  local name
  local -a names=(RAY_TEMP_DIR HEAD_ADDRESS RAY_AUTH_MODE NUM_CPUS NUM_GPUS OBJECT_STORE_MEMORY RAY_WORKER_PORTS
    CONTAINER_IMAGE CONTAINER_ENGINE CONTAINER_OPTIONS)
  [[ "${NODE_NAME}" != head ]] || names+=(RAY_DASHBOARD_PORT RAY_DASHBOARD_HOST)
  for name in "${names[@]}"; do
    printf '%s=%s\n' "${name}" "${!name}"
  done
  printf 'token=%s\n' "$(cksum <<<"${CLUSTER_TOKEN:-}")"
  printf 'HOST_ENV or SETUP_COMMANDS=%s\n' "$(cksum <<<"${HOST_ENV} ${SETUP_COMMANDS}")"
  printf 'environment=%s\n' "$(cksum <<<"${NODE_ENVIRONMENT:-}")"
}

# not_in_force: the names of the settings that differ from those that Ray was started with, with commas.
not_in_force() {
  [[ -r "${STATE}/started" ]] || return 0
  started_with | { grep -vxFf "${STATE}/started" || true; } | cut -d= -f1 | paste -sd, - | sed 's/,/, /g'
}

# started_in: the RAY_TEMP_DIR of the last started Ray; the settings may name another folder now.
started_in() {
  local folder
  folder="$(sed -n 's/^RAY_TEMP_DIR=//p' "${STATE}/started" 2>/dev/null || true)"
  printf '%s\n' "${folder:-${RAY_TEMP_DIR}}"
}

# remove_ours FOLDER...: remove the folders that hold our mark.
remove_ours() {
  local folder
  for folder in "$@"; do
    [[ "$(dir_state "${folder}")" != ours ]] || rm -rf -- "${folder}"
  done
}

# free_kb PATH: free space of the file system that holds PATH, or would hold it.
free_kb() {
  local path="$1"
  until [[ -e "${path}" ]]; do path="$(dirname -- "${path}")"; done
  df -Pk -- "${path}" | awk 'NR == 2 { print $4 }'
}

repo_state() {
  local commit dirty=0 content=""
  if [[ ! -e "${REMOTE_REPO}/.git" && -r "${REMOTE_REPO}/.synced_commit" ]]; then
    sed -n 's/^\(commit\|dirty\|content\)=/&/p' "${REMOTE_REPO}/.synced_commit"
  elif commit="$(git -C "${REMOTE_REPO}" rev-parse HEAD 2>/dev/null)"; then
    if [[ -n "$(git -C "${REMOTE_REPO}" status --porcelain 2>/dev/null | head -n 1)" ]]; then
      dirty=1
      content="$(git -C "${REMOTE_REPO}" diff HEAD | cksum | tr ' ' -)"
    fi
    printf 'commit=%s\ndirty=%s\ncontent=%s\n' "${commit}" "${dirty}" "${content}"
  fi
}

# probe: everything that host_checks.py judges. It changes nothing.
probe() {
  local python session port
  local -a ports=()
  python="$(env_bin)/python"
  printf 'epoch_ns=%s\n' "$(date +%s%N)"
  printf 'hostname=%s\n' "$(hostname 2>/dev/null || uname -n)"
  printf 'bash=%s\n' "${BASH_VERSION}"
  printf 'tmux=%s\n' "$(tmux -V 2>/dev/null | cut -d' ' -f2 || true)"
  printf 'cpus=%s\n' "$(nproc 2>/dev/null || grep -c ^processor /proc/cpuinfo)"
  awk '/^MemAvailable:/ { printf "memory_kb=%s\n", $2 }' /proc/meminfo
  printf 'shm_kb=%s\n' "$(free_kb /dev/shm)"
  printf 'temp_dir=%s\ntemp_dir_kb=%s\ntemp_dir_state=%s\n' \
    "${RAY_TEMP_DIR}" "$(free_kb "${RAY_TEMP_DIR}")" "$(dir_state "${RAY_TEMP_DIR}")"
  printf 'repo=%s\n' "${REMOTE_REPO}"
  if [[ -d "${REMOTE_REPO}" ]]; then
    printf 'repo_kb=%s\n' "$(free_kb "${REMOTE_REPO}")"
    repo_state
  fi
  printf 'gpus=%s\n' "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
  printf 'ip=%s\n' "${NODE_IP}"
  if [[ -r /proc/net/fib_trie && "${NODE_IP}" == *.* ]]; then
    printf 'ip_here=%s\n' "$(grep -A1 -F -- "|-- ${NODE_IP}" /proc/net/fib_trie | grep -c 'host LOCAL' || true)"
  fi
  session=none
  [[ -z "$(command -v tmux)" ]] || session="$(session_state "${NODE_NAME}")"
  printf 'session=%s\n' "${session}"
  [[ "${session}" != none ]] || printf 'other_role=%s\n' "$(other_role | head -n 1)"
  if [[ "${session}" != ours_alive && "${NODE_NAME}" == head ]]; then
    for port in "${RAY_PORT}" "${RAY_DASHBOARD_PORT}"; do
      ! listening "${port}" || ports+=("${port}")
    done
  fi
  printf 'ports_held=%s\nworker_ports=%s\nnum_cpus=%s\n' "${ports[*]-}" "${RAY_WORKER_PORTS}" "${NUM_CPUS}"
  printf 'foreign_ray=%s\n' "$(foreign_ray | paste -sd' ' -)"
  printf 'python=%s\n' "${CONTAINER_IMAGE:-${python}}"
  [[ -z "${CONTAINER_IMAGE}" ]] || container_facts
  if [[ -n "${CONTAINER_IMAGE}" || -x "${python}" ]]; then
    probe_python "${python}" - "${PACKAGES[@]}" <<'PYTHON' || true
import importlib.metadata
import sys

print("python_version=" + ".".join(map(str, sys.version_info[:3])))
for name in sys.argv[1:]:
    try:
        print(f"version.{name}={importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        print(f"version.{name}=")
PYTHON
  fi
  printf 'probe=complete\n'
}

# probe_python PYTHON WORD...: this Python, or the one in the image.
probe_python() {
  if [[ -z "${CONTAINER_IMAGE}" ]]; then
    "$@"
  elif [[ -e "${REMOTE_REPO}/cluster/lib/inside.sh" ]]; then
    (container_exec "" "HOME" timeout 120 python "${@:2}") 2> >(sed 's/^/container_said=/' | tail -n 1)
  fi
}

# foreign_ray: raylets of any user on this host that are not ours.
foreign_ray() {
  local file pid ours
  ours=" $(our_processes | paste -sd' ' -) "
  for file in /proc/[0-9]*/comm; do
    [[ "$({ cat "${file}"; } 2>/dev/null)" == raylet ]] || continue
    pid="${file//[^0-9]/}"
    [[ "${ours}" == *" ${pid} "* || ! "/proc/${pid}/ns/net" -ef /proc/self/ns/net ]] || printf '%s\n' "${pid}"
  done
}

# write_env: write the file `env`, which every shell of ours on this host sources. The token arrives in CLUSTER_TOKEN,
# never in an argument.
write_env() {
  mkdir -p -- "${STATE}"
  chmod 700 -- "${HOME}/.verl_mixed" "${STATE}"
  env_lines >"${STATE}/env.new"
  mv -- "${STATE}/env.new" "${STATE}/env"
  write_container
  if [[ "${NODE_NAME}" == head ]]; then
    printf '%s' "${RECORD_HOSTS}" >"${STATE}/hosts"
    printf '%s' "${RECORD_SETTINGS}" >"${STATE}/settings.env"
  fi
  if [[ "${RAY_AUTH_MODE}" == token ]]; then
    printf '%s' "${CLUSTER_TOKEN:?the token was not sent}" >"${STATE}/token.new"
    mv -- "${STATE}/token.new" "${STATE}/token"
  else
    rm -f -- "${STATE}/token"
  fi
}

# client_port: a free port for Ray's client server, outside the workers' range. With a used port `ray start` fails.
client_port() {
  local port
  if [[ -n "${RAY_WORKER_PORTS}" ]]; then
    printf '%s\n' "$((${RAY_WORKER_PORTS#*-} + 7))"
    return
  fi
  for port in 10001 {20001..20099}; do
    listening "${port}" || break
  done
  printf '%s\n' "${port}"
}

# ray_command: RAY_COMMAND becomes the command that starts Ray, as head or as worker.
ray_command() {
  ray_ports
  RAY_COMMAND=(ray start)
  if [[ "${NODE_NAME}" == head ]]; then
    RAY_COMMAND+=(--head --port "${RAY_PORT}" --dashboard-host "${RAY_DASHBOARD_HOST}" --temp-dir "${RAY_TEMP_DIR}"
      --dashboard-port "${RAY_DASHBOARD_PORT}" --include-dashboard true --ray-client-server-port "$(client_port)")
  else
    RAY_COMMAND+=(--address "${HEAD_ADDRESS}" --temp-dir "${RAY_TEMP_DIR}")
  fi
  RAY_COMMAND+=(--node-name "${NODE_NAME}" --node-ip-address "${NODE_IP}" "${PORT_WORDS[@]}" --disable-usage-stats --block)
  [[ -z "${NUM_CPUS}" ]] || RAY_COMMAND+=(--num-cpus "${NUM_CPUS}")
  [[ -z "${NUM_GPUS}" ]] || RAY_COMMAND+=(--num-gpus "${NUM_GPUS}")
  [[ -z "${OBJECT_STORE_MEMORY}" ]] || RAY_COMMAND+=(--object-store-memory "${OBJECT_STORE_MEMORY}")
}

# printed start | end | run SESSION VARIABLES CMD...: print the command that starts Ray here, that ends the containers, or
# that runs CMD in one, for --dry-run.
printed() {
  case "$1" in
    run) [[ -z "${CONTAINER_IMAGE}" ]] || container_printed "${@:2}" ;;
    end) [[ -z "${CONTAINER_IMAGE}" ]] || container_end_printed ;;
    start)
      ray_command
      if [[ -n "${CONTAINER_IMAGE}" ]]; then
        container_printed "${NODE_NAME}" "VERL_MIXED_NODE $(container_names <(env_lines))" "${RAY_COMMAND[@]}"
      else
        printf '+%s\n' "$(printf ' %q' "${RAY_COMMAND[@]}")"
      fi
      ;;
  esac
}

# own_temp_dir: make RAY_TEMP_DIR, or close it for other users, who may have written to it, because Ray opens it for all.
own_temp_dir() {
  [[ "$(dir_state "${RAY_TEMP_DIR}")" != foreign ]] || return 1
  mkdir -p -- "${RAY_TEMP_DIR}"
  chmod 700 -- "${RAY_TEMP_DIR}"
  find -H "${RAY_TEMP_DIR}" -mindepth 1 -maxdepth 1 ! -user "${EUID}" -exec rm -rf -- {} +
  mkdir -p -- "${RAY_TEMP_DIR}/tmp"
  printf '%s' "${MARK}" >"${RAY_TEMP_DIR}/.verl_mixed_cluster"
  [[ "$(dir_state "${RAY_TEMP_DIR}")" == ours ]]
}

# start_ray: Ray in this node's tmux session, which keep_up starts again if it ends.
start_ray() {
  local -a command
  ray_command
  command=("${RAY_COMMAND[@]}")
  [[ -z "${CONTAINER_IMAGE}" ]] || command=("${STATE}/container" --of-env "${command[@]}")
  if ! own_temp_dir; then
    words "RAY_TEMP_DIR=${RAY_TEMP_DIR} is not ours: it has no mark of this cluster, or another user can change it;" \
      "choose another folder"
    return 1
  fi
  {
    printf '#!/usr/bin/env bash\n. %q\nexport VERL_MIXED_NODE=%q\n' "${STATE}/env" "${MARK}"
    printf 'ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"\n'
    declare -f read_stat in_sessions own_session end_rest end_kept keep_up
    printf 'keep_up %q' "${STATE}/keep_up"
    printf ' %q' "${command[@]}"
    printf '\n'
  } >"${STATE}/start_ray.sh"
  rm -f -- "${STATE}/keep_up" # `start` writes it once Ray is up: a Ray that cannot start must end
  started_with >"${STATE}/started"
  # One tmux call, so that the output of a Ray that ends at once is kept. The tmux server must not carry our mark in its
  # environment, because sessions of other people may later run in the same server.
  tmux new-session -d -s "${NODE_NAME}" -x 200 -y 50 -c "${HOME}" bash "${STATE}/start_ray.sh" \; \
    set-environment -t "=${NODE_NAME}" VERL_MIXED_CLUSTER "${CLUSTER_ID}" \; \
    set-option -w -t "=${NODE_NAME}:" remain-on-exit on
}

ray_answers_or_died() {
  [[ "$(session_state "${NODE_NAME}")" == ours_alive ]] || return 0
  if [[ "${NODE_NAME}" == head ]]; then
    listening "${RAY_PORT}"
  else
    last_lines "${NODE_NAME}" 200 | grep 'Ray runtime started' >/dev/null
  fi
}

# start TIMEOUT_S: prints `up already`, `started`, `started again` or `started at another try`; returns 1 and prints
# Ray's last lines on failure. A try begins before TIMEOUT_S is over, and may take so long itself.
start() {
  local state said=started began changed until=$((SECONDS + $1))
  state="$(session_state "${NODE_NAME}")"
  case "${state}" in
    foreign)
      words "tmux session '${NODE_NAME}' is not ours (no VERL_MIXED_CLUSTER=${CLUSTER_ID} in its environment):" \
        "rename it with 'tmux rename-session -t ${NODE_NAME} other'"
      return 1
      ;;
    ours_alive)
      changed="$(not_in_force)"
      if [[ -n "${changed}" ]]; then
        words "${NODE_NAME}: Ray is up with another ${changed}: run './setup_cluster.sh restart', or take back" \
          "what was changed"
        return 1
      fi
      write_env
      echo "up already"
      return
      ;;
    ours_dead)
      words "${NODE_NAME}: Ray had ended; its last words: $(last_lines "${NODE_NAME}" 3 | paste -sd' ' -)"
      said="started again"
      ;;
  esac
  # `ray start` waits 30 s for its raylet (fixed in Ray). On a busy host that can be too short, and a later try succeeds.
  # A Ray that ended earlier than that had another cause, so it is not tried again.
  while true; do
    began="${SECONDS}"
    end_processes 10
    end_sessions "${NODE_NAME}"
    [[ "$(started_in)" == "${RAY_TEMP_DIR}" ]] || remove_ours "$(started_in)"
    write_env
    start_ray || return 1
    if ! within "$1" ray_answers_or_died; then
      words "Ray did not start within $1 s; its last words:"
      last_lines "${NODE_NAME}" >&2
      [[ "${NODE_NAME}" == head ]] || reach >&2
      return 1
    fi
    if [[ "$(session_state "${NODE_NAME}")" == ours_alive ]]; then
      : >"${STATE}/keep_up"
      chmod 700 -- "${RAY_TEMP_DIR}" # Ray opened it for all users
      echo "${said}"
      return
    fi
    words "Ray ended after $((SECONDS - began)) s; its last words:"
    last_lines "${NODE_NAME}" >&2
    ((SECONDS - began >= 25 && SECONDS < until)) || return 1
    said="started at another try"
  done
}

# reach: whether the head's port answers from here.
reach() {
  if timeout 3 bash -c "exec 3<>/dev/tcp/${HEAD_IP}/${RAY_PORT}" 2>/dev/null; then
    echo "the head's port ${HEAD_ADDRESS} answers from here"
  else
    echo "the head's port ${HEAD_ADDRESS} does not answer from here: open it in the firewall, or give" \
      "the head's address on the nodes' network (in a hosts file: ip=)"
  fi
}

# ray-nodes WORD...: cluster/ray_nodes.py in the environment of the cluster.
ray_nodes() {
  if [[ ! -r "${STATE}/env" ]]; then
    words "no cluster was set up here: ${STATE}/env is missing"
    return 1
  fi
  # shellcheck disable=SC1091 # written by write_env
  . "${STATE}/env"
  exec python -c "${RAY_NODES_PY}" "$@"
}

# status: the state of this host.
status() {
  local state pid name
  state="$(session_state "${NODE_NAME}")"
  printf 'session=%s\n' "${state}"
  pid="$(tmux list-panes -t "=${NODE_NAME}:" -F '#{pane_pid}' 2>/dev/null | head -n 1 || true)"
  if [[ "${state}" == ours_alive ]]; then
    printf 'uptime_s=%s\n' "$(($(date +%s) - $(stat -c %Y "/proc/${pid}")))"
    # only `setup` sends the token and the variables
    printf 'changed=%s\n' "$(not_in_force | sed -E 's/(token|environment)(, )?//g; s/, $//')"
  fi
  for name in $(run_sessions); do
    printf 'run=%s %s\n' "$(session_state "${name}")" "${name}"
  done
}

# run_sessions: the tmux sessions of runs, of this cluster or not.
run_sessions() { tmux list-sessions -F '#{session_name}' 2>/dev/null | grep -E "^${RUN_SESSIONS}(_|$)" || true; }

# signal_processes SIGNAL
signal_processes() {
  local pid
  for pid in $(our_processes); do
    kill -s "$1" "${pid}" 2>/dev/null || true
  done
}

# end_processes GRACE_S: send SIGTERM to the panes' own processes first, because `ray start --block` then drains its node
# and ends its parts in order (2 to 4 s; if all get the signal at once they wait for one another). Then send SIGTERM to
# the remaining processes, and SIGKILL after GRACE_S.
end_processes() {
  local name pid
  local -a leaders=()
  rm -f -- "${STATE}/keep_up"
  none_of_ours && return
  for name in $(our_sessions); do
    mapfile -t -O "${#leaders[@]}" leaders < <(our_panes "${name}")
  done
  for pid in "${leaders[@]}"; do
    kill -s TERM "${pid}" 2>/dev/null || true
  done
  within "$1" have_ended "${leaders[@]}" && none_of_ours && return
  signal_processes TERM
  within 5 none_of_ours && return
  signal_processes KILL
  within 10 none_of_ours && return
  words "these processes did not end: $(our_processes | paste -sd' ' -)"
  return 1
}

# end_sessions [NAME]: our tmux sessions, or the one of this name when it is ours. A session ends with its last pane, so one
# that a user has split stays, without our mark and name.
end_sessions() {
  local name pane command
  for name in $(our_sessions); do
    [[ -z "${1:-}" || "${name}" == "$1" ]] || continue
    while read -r pane command; do
      [[ "${command}" != */.verl_mixed/* ]] || tmux kill-pane -t "${pane}" 2>/dev/null || true
    done < <(tmux list-panes -s -t "=${name}" -F '#{pane_id} #{pane_start_command}' 2>/dev/null || true)
    tmux set-environment -t "=${name}" -u VERL_MIXED_CLUSTER 2>/dev/null || continue
    tmux rename-session -t "=${name}" "${name}_before_$(date +%s)" 2>/dev/null || true
  done
}

run_has_ended() { [[ "$(session_state "$1")" != ours_alive ]]; }

# save_run SESSION GRACE_S: the same as `run_mixed_training.sh stop`: save a checkpoint after the current step, then end the
# run.
save_run() {
  local folder
  folder="$(tmux show-environment -t "=$1" VERL_MIXED_RUN 2>/dev/null)" || return
  # shellcheck disable=SC1091 # written by write_env
  (. "${STATE}/env" && cd -- "${REMOTE_REPO}" && verl-mixed stop --grace "$2" "${folder#*=}") >&2
}

# stop-run GRACE_S: end the runs in their tmux sessions; with signals if a run does not answer the request.
stop_run() {
  local name failed=0
  for name in $(run_sessions); do
    run_has_ended "${name}" || stop_session "${name}" "$1" || failed=1
  done
  return "${failed}"
}

# stop_session SESSION GRACE_S
stop_session() {
  local signal pid grace_s=$(($2 < 60 ? $2 : 60))
  save_run "$@" || words "it could not be asked for a checkpoint (see above)"
  within 5 run_has_ended "$1" && return
  for signal in INT TERM; do
    run_has_ended "$1" && return
    for pid in $(our_panes "$1"); do
      kill -s "${signal}" -- "-${pid}" 2>/dev/null || kill -s "${signal}" "${pid}" 2>/dev/null || true
    done
    within "${grace_s}" run_has_ended "$1" && return
  done
  words "the run in tmux session $1 did not end within ${grace_s} s of SIGTERM"
  return 1
}

# stop GRACE_S: end our processes, then our tmux sessions; their files stay.
stop() {
  end_processes "$1"
  end_sessions
  # not without containers: the question alone makes podman write files of its own
  [[ -z "${CONTAINER_IMAGE}" && ! -e "${STATE}/container" ]] || container_end
}

# cleanup GRACE_S: stop, then remove our files.
cleanup() {
  stop "$1"
  remove_ours "${RAY_TEMP_DIR}" "$(started_in)"
  rm -rf -- "${STATE}"
  rmdir -- "${HOME}/.verl_mixed" 2>/dev/null || true
}

# logs follow|once: print the pane, then Ray's own logs.
logs() {
  local folder="${RAY_TEMP_DIR}/session_latest/logs"
  echo "== tmux session ${NODE_NAME} ($(session_state "${NODE_NAME}"))"
  last_lines "${NODE_NAME}" 30
  if [[ ! -d "${folder}" ]]; then
    echo "== no logs of Ray here: ${folder} is missing"
    return
  fi
  local -a files
  mapfile -t files < <(cd -- "${folder}" &&
    find . -maxdepth 1 -type f -size +0 \( -name 'gcs_server.*' -o -name 'raylet.*' -o -name 'monitor.*' \
      -o -name 'dashboard.*' -o -name 'log_monitor.*' \) | sort)
  cd -- "${folder}"
  echo "== ${folder}"
  if [[ "$1" == follow ]]; then
    exec env VERL_MIXED_NODE="${MARK}" tail -n 5 -F -- "${files[@]}" # ours: it ends with the cluster
  fi
  ((${#files[@]} == 0)) || tail -n 10 -- "${files[@]}"
}

# shared write|check|remove NONCE: write, look for or remove a file in each of SHARED_DIRS.
shared() {
  local folder file failed=0
  for folder in "${SHARED_DIRS[@]}"; do
    file="${folder}/.verl_mixed_shared_$2"
    case "$1" in
      write) { printf '%s' "$2" >"${file}"; } 2>/dev/null || {
        printf '%s\n' "${folder} cannot be written"
        failed=1
      } ;;
      check) [[ "$(cat -- "${file}" 2>/dev/null)" == "$2" ]] || {
        printf '%s\n' "${folder} is not the folder that the head has"
        failed=1
      } ;;
      remove) rm -f -- "${file}" ;;
    esac
  done
  return "${failed}"
}

# sync-state NONCE: prints what `sync` must do on this host: `same` (the folder is the jumphost's own), `done` (another
# host has copied into the shared folder) or `wanted` (copy).
sync_state() {
  if [[ "$(cat -- "${REMOTE_REPO}/.cluster/sync_nonce" 2>/dev/null)" == "$1" ]]; then
    echo same
  elif grep -qsx "sync=$1" "${REMOTE_REPO}/.synced_commit"; then
    echo "done"
  elif [[ -e "${REMOTE_REPO}/.git" ]]; then
    words "${REMOTE_REPO} is a git checkout of its own: sync would overwrite it; update it there with git, and" \
      "start with --no-sync, or give another REMOTE_REPO"
    return 1
  else
    mkdir -p -- "${REMOTE_REPO}"
    echo "wanted $(command -v rsync >/dev/null && echo rsync || echo tar)"
  fi
}

# sync-finish: remove files that an earlier sync copied and this one did not; record the new state.
sync_finish() {
  local file
  cd -- "${REMOTE_REPO}"
  if [[ -r .synced_files ]]; then
    while IFS= read -r -d '' file; do
      case "${file}" in
        /* | ../* | */../* | .venv/* | runs/* | logs/* | data/*) continue ;;
      esac
      rm -f -- "${file}"
      rmdir -p --ignore-fail-on-non-empty -- "$(dirname -- "${file}")" 2>/dev/null || true
    done < <(LC_ALL=C comm -z -23 .synced_files .synced_files.new)
  fi
  mv -- .synced_files.new .synced_files
  mv -- .synced_commit.new .synced_commit
}

# make-venv: make .venv in the same way as run_mixed_training.sh.
make_venv_here() {
  [[ -z "${CONTAINER_IMAGE}" ]] || return 0 # the image has the packages, or the checks say what is missing
  if [[ -n "${CONDA_ENV}" || "${VENV}" != "${REMOTE_REPO}/.venv" ]]; then
    [[ -x "$(env_bin)/python" ]] && return
    words "no $(env_bin)/python: create the environment, or unset CONDA_ENV and VENV to have .venv made here"
    return 1
  fi
  cd -- "${REMOTE_REPO}"
  bash -euo pipefail -c 'REPO_ROOT="$PWD"; . cluster/lib/common.sh; . cluster/lib/bootstrap.sh; bootstrap run' && return
  words "cannot make ${VENV}: when this host reaches no package index, copy an environment here and name it in VENV," \
    "or CONDA_ENV"
  return 1
}

# doctor: run `verl-mixed doctor` in the environment of the cluster.
doctor() {
  local verl_mixed
  if [[ -n "${CONTAINER_IMAGE}" ]]; then
    # shellcheck disable=SC1091 # written by write_env
    [[ ! -r "${STATE}/env" ]] || . "${STATE}/env"
    cd -- "${REMOTE_REPO}" && container_exec "" "" verl-mixed doctor "$@"
  fi
  verl_mixed="$(env_bin)/verl-mixed"
  if [[ ! -x "${verl_mixed}" ]]; then
    words "no ${verl_mixed}: the environment is not complete; run setup_cluster.sh sync"
    return 1
  fi
  export PYTHONPATH="${REMOTE_REPO}" # before `setup` there is no env
  # shellcheck disable=SC1091 # written by write_env
  [[ ! -r "${STATE}/env" ]] || . "${STATE}/env"
  cd -- "${REMOTE_REPO}" && exec "${verl_mixed}" doctor "$@"
}

node_main() {
  local subcommand="$1"
  shift
  case "${subcommand}" in
    probe | start | status | stop | cleanup | logs | shared | doctor | reach | printed) "${subcommand}" "$@" ;;
    stop-run) stop_run "$@" ;;
    sync-state) sync_state "$@" ;;
    sync-finish) sync_finish ;;
    repo-state) repo_state ;;
    make-venv) make_venv_here ;;
    ray-nodes) ray_nodes "$@" ;;
    *) words "node.sh: unknown subcommand '${subcommand}'" && return 2 ;;
  esac
}

# bash reads this text from its stdin, so a command that reads stdin would take the rest of the text
node_main "$@" </dev/null
