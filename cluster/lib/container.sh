# shellcheck shell=bash
# Programs of the cluster inside containers (CONTAINER_IMAGE). It decides which words start a container with docker, podman
# or apptainer, which variables it gets, and which containers are ended. cluster/lib/remote.sh sends this text to a host
# before node.sh. `setup` writes the settings and these functions into ~/.verl_mixed/<cluster>/container, which runs its
# words in a container, and a `python`, `ray` and `verl-mixed` beside it, which call it.
#
# A container shares the host's network, process ids and shared memory. So Ray's addresses are the host's, and all that
# looks at processes (status, stop, cleanup, the run's claim on its folder) is the same as without containers.
# shellcheck disable=SC2154 # node.sh's settings: CONTAINER_IMAGE, CONTAINER_ENGINE, CONTAINER_OPTIONS, STATE, MARK, ...

# Variables of the host that mean nothing in a container, or that an image has of its own.
readonly CONTAINER_LEAVES=" PATH LD_LIBRARY_PATH LD_PRELOAD PYTHONHOME CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE \
CONDA_SHLVL CONDA_PYTHON_EXE VIRTUAL_ENV SHELL PWD OLDPWD SHLVL _ TMUX TMUX_PANE MAIL HOSTNAME LS_COLORS MANPATH INFOPATH \
BASH_ENV ENV DISPLAY XAUTHORITY MODULEPATH MODULESHOME LOADEDMODULES _LMFILES_ "

# container_engine: docker, podman or apptainer; the first that is here unless CONTAINER_ENGINE names one.
container_engine() {
  local engine
  for engine in ${CONTAINER_ENGINE:-docker podman apptainer}; do
    command -v "${engine}" >/dev/null && printf '%s\n' "${engine}" && return
  done
  printf '%s\n' "no ${CONTAINER_ENGINE:-docker, podman or apptainer} on $(hostname 2>/dev/null || uname -n): install it," \
    "name another in CONTAINER_ENGINE, or unset CONTAINER_IMAGE" >&2
  return 1
}

# container_mounts: the folders of the host that a container sees, at the same path, one per line. The home folder has the
# token, the caches of models and the key of Weights & Biases. A link to a large disk is followed.
container_mounts() {
  local folder
  local -a folders=("${HOME}" "${REMOTE_REPO}" "${RAY_TEMP_DIR}" ${WANDB_DIR:+"${WANDB_DIR}"} "${SHARED_DIRS[@]}")
  for folder in runs data logs; do
    [[ ! -L "${REMOTE_REPO}/${folder}" ]] || folders+=("$(readlink -f -- "${REMOTE_REPO}/${folder}")")
  done
  for folder in "${folders[@]%/}"; do
    [[ -z "${CONTAINER_PRINTED:-}" && ! -e "${folder}" ]] || printf '%s\n' "${folder}"
  done | awk '!seen[$0]++'
}

# container_names FILE: the variables that a file `env` sets, on one line. A name in a quoted value may be among them, which
# does no harm: a name without a value is not passed on.
container_names() {
  local name
  sed -n 's/^\(.*; \(then \)\{0,1\}\)\{0,1\}export //p' "$1" | grep -oE '(^| )[A-Za-z_][A-Za-z0-9_]*=' | tr -d ' =' |
    LC_ALL=C sort -u | while IFS= read -r name; do
    [[ "${CONTAINER_LEAVES}" == *" ${name} "* ]] || printf '%s\n' "${name}"
  done | paste -sd' ' -
}

# container_shell_names: the variables of this shell that a container gets.
container_shell_names() {
  local name
  while IFS= read -r name; do
    case "${name}" in
      SSH_* | XDG_* | DBUS_* | LMOD_* | SLURM_* | BASH_*) continue ;;
    esac
    [[ "${CONTAINER_LEAVES}" == *" ${name} "* ]] || printf '%s\n' "${name}"
  done < <(compgen -e | LC_ALL=C sort)
}

# container_command ENGINE NAME VARIABLES CMD...: CONTAINER_COMMAND becomes the words that run CMD in a container with this
# name (may be empty) and these variables of this shell, by name: no value is in an argument.
container_command() {
  local engine="$1" name="$2" variable folder gpus="" terminal="${CONTAINER_PRINTED:-}" inside=("${@:4}")
  local -a variables=() mounts=() options=()
  read -ra variables <<<"$3"
  mapfile -t mounts < <(container_mounts)
  mapfile -t options < <(xargs -r -n 1 printf '%s\n' <<<"${CONTAINER_OPTIONS}")
  [[ -n "${CONTAINER_PRINTED:-}" ]] || ! nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null || gpus=1
  folder="${REMOTE_REPO}"
  [[ "${PWD}/" != "${REMOTE_REPO}/"* ]] || folder="${PWD}"
  inside=(bash "${REMOTE_REPO}/cluster/lib/inside.sh" "${inside[@]}")
  if [[ "${engine}" == apptainer ]]; then
    CONTAINER_COMMAND=(apptainer exec --cleanenv ${gpus:+--nv})
    for variable in "${mounts[@]}"; do CONTAINER_COMMAND+=(--bind "${variable}"); done
    CONTAINER_COMMAND+=(--pwd "${folder}" "${options[@]}" "${CONTAINER_IMAGE}" "${inside[@]}")
    return
  fi
  # an image that is not here is refused and not fetched by every node at once; an entry point may print into results
  CONTAINER_COMMAND=("${engine}" run --rm --pull never ${name:+--name "${name}"} --label "verl_mixed.cluster=${CLUSTER_ID}"
    --label "verl_mixed.node=${MARK}" --network host --ipc host --pid host --security-opt label=disable --entrypoint '')
  container_user "${engine}"
  [[ -z "${gpus}" ]] || case "${engine}" in
    docker) CONTAINER_COMMAND+=(--gpus all) ;;
    podman) CONTAINER_COMMAND+=(--device nvidia.com/gpu=all) ;;
  esac
  for variable in "${mounts[@]}"; do CONTAINER_COMMAND+=(-v "${variable}:${variable}"); done
  for variable in "${variables[@]}"; do CONTAINER_COMMAND+=(--env "${variable}"); done
  # a terminal for a terminal; without input where that is none, because the engines refuse both words then
  if [[ -z "${terminal}" && -t 1 ]]; then
    terminal=-t
    [[ ! -t 0 ]] || terminal=-it
  fi
  CONTAINER_COMMAND+=(--workdir "${folder}" "${terminal:--i}" "${options[@]}" "${CONTAINER_IMAGE}" "${inside[@]}")
}

# container_user ENGINE: append this user and its groups, so that files belong to it and its processes can be ended.
container_user() {
  local group
  if [[ "$1" == podman && "${EUID}" != 0 ]]; then
    CONTAINER_COMMAND+=(--userns keep-id --group-add keep-groups)
  elif [[ -n "${CONTAINER_PRINTED:-}" ]]; then
    CONTAINER_COMMAND+=(--user ID_THERE)
  else
    CONTAINER_COMMAND+=(--user "$(id -u):$(id -g)")
    for group in $(id -G); do
      [[ "${group}" == "$(id -g)" ]] || CONTAINER_COMMAND+=(--group-add "${group}")
    done
  fi
}

# container_exec NAME VARIABLES CMD...: run CMD in a container in place of this shell; VARIABLES empty: those of this shell.
container_exec() {
  local engine variable names="$2"
  engine="$(container_engine)" || exit 1
  [[ -n "${names}" ]] || names="$(container_shell_names | paste -sd' ' -)"
  USER="${USER:-$(id -un)}"
  export USER LOGNAME="${LOGNAME:-${USER}}"
  [[ -z "${VENV}" ]] || export VIRTUAL_ENV="${VENV}"
  names="$(container_sorted "${names}")"
  if [[ "${engine}" == apptainer ]]; then
    for variable in ${names}; do
      [[ -z "${!variable+set}" ]] || export "APPTAINERENV_${variable}=${!variable}"
    done
  fi
  [[ -z "$1" ]] || container_end "$1" # of a host that was restarted: an engine keeps the container
  container_command "${engine}" "$1" "${names}" "${@:3}"
  exec "${CONTAINER_COMMAND[@]}"
}

# container_sorted VARIABLES: these and those that every container gets, each once.
container_sorted() {
  printf '%s\n' HOME USER LOGNAME ${VENV:+VIRTUAL_ENV} "${1// /$'\n'}" | sed '/^$/d' | LC_ALL=C sort -u | paste -sd' ' -
}

# container_end [NAME]: end the containers of this cluster on this host, or the one of this name. Apptainer has none: its
# programs are processes of the host.
container_end() {
  local engine
  local -a found=() filter=()
  for engine in docker podman; do
    [[ "${CONTAINER_ENGINE:-${engine}}" == "${engine}" ]] || continue
    command -v "${engine}" >/dev/null || continue
    filter=(--filter "label=verl_mixed.node=${MARK}" --filter "label=verl_mixed.cluster=${CLUSTER_ID}")
    mapfile -t found < <(timeout 20 "${engine}" ps -aq ${1:+--filter "name=^$1\$"} "${filter[@]}" 2>/dev/null || true)
    ((${#found[@]} == 0)) || timeout 60 "${engine}" rm -f "${found[@]}" >/dev/null
  done
}

# container_name: of the container for this pane's program: by its tmux session, which only our start scripts have
# VERL_MIXED_NODE in. Other containers have no name.
container_name() {
  local session
  [[ -n "${VERL_MIXED_NODE:-}" && -n "${TMUX:-}" ]] || return 0
  session="$(tmux display-message -p -t "${TMUX_PANE:-}" '#S' 2>/dev/null)" || return 0
  printf 'verl_mixed_%s_%s\n' "${CLUSTER_ID}" "${session}"
}

# container_main [--of-env] CMD...: what the file `container` does. --of-env: with the variables of the file `env` and no
# others, as Ray has them.
container_main() {
  local names=""
  if [[ "$1" == --of-env ]]; then
    shift
    names="VERL_MIXED_NODE $(container_names "${STATE}/env")"
  fi
  container_exec "$(container_name)" "${names}" "$@"
}

# write_container: the file `container`, and the programs that call it.
write_container() {
  local name
  rm -rf -- "${STATE:?}/bin" "${STATE}/container"
  [[ -n "${CONTAINER_IMAGE}" ]] || return 0
  {
    printf '#!/usr/bin/env bash\n# Runs its words in a container of the cluster. Written by setup_cluster.sh.\nset -euo pipefail\n'
    for name in CONTAINER_IMAGE CONTAINER_ENGINE CONTAINER_OPTIONS CLUSTER_ID MARK STATE VENV WANDB_DIR REMOTE_REPO \
      RAY_TEMP_DIR CONTAINER_LEAVES; do
      printf '%s=%q\n' "${name}" "${!name}"
    done
    printf 'SHARED_DIRS=(%s)\n' "${SHARED_DIRS[*]@Q}"
    declare -f container_engine container_mounts container_names container_shell_names container_command container_user \
      container_exec container_sorted container_end container_name container_main
    # shellcheck disable=SC2016 # for the file's own shell
    printf 'container_main "$@"\n'
  } >"${STATE}/container"
  mkdir -p -- "${STATE}/bin"
  for name in python ray verl-mixed; do
    printf '#!/usr/bin/env bash\nexec %q %s "$@"\n' "${STATE}/container" "${name}" >"${STATE}/bin/${name}"
  done
  chmod 700 -- "${STATE}/container" "${STATE}/bin/"*
}

# container_facts: what `probe` says of the engine and the image. It changes nothing.
container_facts() {
  local engine said id=""
  printf 'container_image=%s\n' "${CONTAINER_IMAGE}"
  engine="$(container_engine 2>/dev/null)" || {
    printf 'container_error=%s\n' "no ${CONTAINER_ENGINE:-docker, podman or apptainer} here"
    return 0
  }
  printf 'container_engine=%s\n' "${engine}"
  if [[ "${engine}" == apptainer ]]; then
    # the name of an image in a registry is fetched by apptainer itself
    [[ "${CONTAINER_IMAGE}" == *://* || -r "${CONTAINER_IMAGE}" ]] || printf 'container_missing=1\n'
    return 0
  fi
  if ! said="$(timeout 20 "${engine}" version 2>&1)"; then
    printf 'container_error=%s\n' "${engine} does not work: $(tail -n 1 <<<"${said}")"
  elif id="$(timeout 20 "${engine}" image inspect --format '{{.Id}}' "${CONTAINER_IMAGE}" 2>/dev/null)"; then
    printf 'container_id=%s\n' "${id}"
  else
    printf 'container_missing=1\n'
  fi
}

# container_printed SESSION VARIABLES CMD...: print the command that runs CMD in a container, quoted to be pasted; for
# --dry-run, on another machine.
container_printed() {
  # shellcheck disable=SC2016 # the host's shell expands it
  local user='"$(id -u):$(id -g)"' engine="${CONTAINER_ENGINE:-docker}"
  [[ -n "${CONTAINER_ENGINE}" ]] || printf '# as docker; the engine is the first of docker, podman and apptainer on the host\n'
  case "${engine}" in
    docker) printf '# with --gpus all where nvidia-smi lists a GPU, and a --group-add for each further group of the user\n' ;;
    podman) printf '# with --device nvidia.com/gpu=all where nvidia-smi lists a GPU; not as root --userns keep-id for --user\n' ;;
    apptainer) printf '# with --nv where nvidia-smi lists a GPU; variables come as APPTAINERENV_NAME\n' ;;
  esac
  local CONTAINER_PRINTED=-it                   # Ray's pane of tmux
  [[ "${3:-}" == ray ]] || CONTAINER_PRINTED=-t # a run reads nothing
  container_command "${engine}" "verl_mixed_${CLUSTER_ID}_$1" "$(container_sorted "$2")" "${@:3}"
  printf '+ %s\n' "$(printf '%q ' "${CONTAINER_COMMAND[@]}" | sed -e "s/ID_THERE/${user}/" -e 's/ $//')"
}

# container_end_printed: the same for container_end.
container_end_printed() {
  local engine="${CONTAINER_ENGINE:-docker}"
  [[ "${engine}" != apptainer ]] || return 0
  printf '+ %s ps -aq --filter %q --filter %q | xargs -r %s rm -f\n' "${engine}" "label=verl_mixed.node=${MARK}" \
    "label=verl_mixed.cluster=${CLUSTER_ID}" "${engine}"
}
