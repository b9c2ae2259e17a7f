#!/usr/bin/env bats
# CONTAINER_IMAGE of setup_cluster.sh with stand-ins for docker, podman and apptainer: they record their words and run the
# command here, with the variables that their words name and no others.
# bats file_tags=slow
bats_require_minimum_version 1.8.0

setup() {
  command -v tmux >/dev/null || skip "no tmux here"
  load cluster_helpers
  make_site
  export IMAGE=registry.example/mixed:1 CONTAINERS="${SITE}/containers"
  export CONTAINER_IMAGE="${IMAGE}"
  unset CONTAINER_ENGINE CONTAINER_OPTIONS RAY_WORKER_PORTS
  mkdir -p "${CONTAINERS}"
  for host in "${HEAD}" w0 w1; do
    mkdir -p "${SITE}/${host}/repo/cluster"
    cp -r "${CHECKOUT}/cluster/lib" "${SITE}/${host}/repo/cluster"
  done
  # the machine's own engines and GPUs are not the hosts'
  printf '#!/usr/bin/env bash\nexit 127\n' >"${SITE}/bin/nvidia-smi"
  chmod +x "${SITE}/bin/nvidia-smi"
  make_engine docker
}

teardown() { end_site; }

# make_engine NAME
make_engine() {
  cat >"${SITE}/bin/$1" <<'FAKE'
#!/usr/bin/env bash
engine="${0##*/}"
call="$(printf '%q ' "${engine}" "$@")"
echo "${call% }" >>"${SITE}/engine_calls" # in one piece: others write beside it
case "$1 ${2:-}" in
  "version "*) [[ ! -e "${SITE}/engine_down" ]] || { echo "Cannot connect to the daemon" >&2 && exit 1; } ;;
  "image inspect") [[ ! -e "${HOME}/no_image" ]] && cat "${HOME}/image_id" 2>/dev/null || { [[ ! -e "${HOME}/no_image" ]] && echo sha256:11; } ;;
  "ps "*)
    shift
    for file in "${CONTAINERS}"/*; do
      [[ -e "${file}" ]] && kill -0 "$(head -n 1 "${file}")" 2>/dev/null || continue
      for word in "$@"; do
        case "${word}" in
          label=*) grep -qx "${word}" "${file}" || continue 2 ;;
          name=*) [[ "name=^${file##*/}\$" == "${word}" ]] || continue 2 ;;
        esac
      done
      echo "${file##*/}"
    done
    ;;
  "rm -f")
    for name in "${@:3}"; do kill "$(head -n 1 "${CONTAINERS}/${name}")"; done
    ;;
  "run "* | "exec "*)
    names=() name="random$$" labels=()
    while [[ "$1" != "${IMAGE}" ]]; do
      (($# > 1)) || { echo "no such image" >&2 && exit 125; }
      case "$1" in
        --env) names+=("$2") ;;
        --name) name="$2" ;;
        --label) labels+=("label=$2") ;;
        --workdir | --pwd) cd "$2" ;;
      esac
      shift
    done
    shift
    words=()
    for variable in "${names[@]}"; do
      [[ -z "${!variable+set}" ]] || words+=("${variable}=${!variable}")
    done
    if [[ "${engine}" == apptainer ]]; then
      words=("HOME=${HOME}")
      while IFS= read -r variable; do words+=("${variable#APPTAINERENV_}=${!variable}"); done < <(compgen -e APPTAINERENV_)
    fi
    printf '%s\n' $$ "${labels[@]}" >"${CONTAINERS}/${name}"
    exec env -i PATH="${PATH}" SITE="${SITE}" FAKE_HOST="${FAKE_HOST}" "${words[@]}" "$@"
    ;;
esac
FAKE
  chmod +x "${SITE}/bin/$1"
}

# runs HOST: the recorded command that started Ray there.
runs() { grep -F " run " "${SITE}/engine_calls" | grep -F "/$1/repo/cluster/lib/inside.sh ray start"; }

@test "Ray is started in a container of each host, with the words that --dry-run printed" {
  run --separate-stderr "${SCRIPT}" setup --dry-run
  [ "${status}" -eq 0 ]
  # shellcheck disable=SC2154 # set by run
  dry="${stderr}"
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"setup: 3 of 3 nodes joined"* ]]
  for host in "${HEAD}" w0 w1; do
    printed="$(sed -n "/^on ${host}:\$/,/^+ docker run/p" <<<"${dry}" | sed -n 's/^+ docker run/docker run/p')"
    [ -n "${printed}" ]
    expected="$(HOME="${SITE}/${host}" bash -c 'printf "%q " '"${printed}")"
    # a word for each further group of this user comes at the user, and Ray's client port may be taken meanwhile
    ran="$(runs "${host}" | sed -E 's/ --group-add [0-9]+//g; s/(client-server-port) [0-9]+/\1 N/')"
    diff <(tr ' ' '\n' <<<"${ran}") <(sed -E 's/(client-server-port) [0-9]+/\1 N/' <<<"${expected% }" | tr ' ' '\n')
  done
}

@test "a container is named after its session, labelled, and sees the host's network, memory, repository and home" {
  "${SCRIPT}" setup
  words="$(runs w0)"
  [[ "${words}" == *" --name verl_mixed_${HEAD}_node0 --label verl_mixed.cluster=${HEAD} "* ]]
  [[ "${words}" == *" --network host --ipc host --pid host "* && "${words}" == *" --user $(id -u):$(id -g) "* ]]
  [[ "${words}" == *" -v ${SITE}/w0:${SITE}/w0 "* && "${words}" == *" -v /tmp/vm_${HEAD}_w0:/tmp/vm_${HEAD}_w0 "* ]]
  [[ "${words}" != *"--gpus"* ]]
}

@test "variables go in by name: the token and HOST_ENV are inside, and in no argument" {
  HOST_ENV="NCCL_SOCKET_IFNAME=eth7" "${SCRIPT}" setup
  token="$(cat "${CHECKOUT}/.cluster/${HEAD}/token")"
  [ "$(grep -c "token=${token}" "${SITE}/ray_calls")" -eq 3 ]
  run ! grep -e "${token}" -e eth7 "${SITE}/engine_calls"
  [[ "$(runs w1)" == *" --env NCCL_SOCKET_IFNAME "*" --env RAY_AUTH_TOKEN_PATH "* ]]
  [[ "$(runs w1)" != *" --env PATH "* ]]
}

@test "GPUs are given where the host has some, in the words of the engine" {
  # shellcheck disable=SC2016 # the stand-in expands it
  printf '#!/usr/bin/env bash\n[[ "${FAKE_HOST}" != w1 ]] || echo "GPU 0: H100"\n' >"${SITE}/bin/nvidia-smi"
  "${SCRIPT}" setup
  [[ "$(runs w1)" == *" --gpus all "* && "$(runs w0)" != *"--gpus"* ]]
  "${SCRIPT}" cleanup --yes
  make_engine podman
  CONTAINER_ENGINE=podman "${SCRIPT}" setup
  [[ "$(runs w1 | grep ^podman)" == *" --device nvidia.com/gpu=all "* ]]
}

@test "with apptainer the words are its own, and the image is a file" {
  make_engine apptainer
  export IMAGE="${SITE}/mixed.sif"
  export CONTAINER_IMAGE="${IMAGE}" CONTAINER_ENGINE=apptainer
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"apptainer has no CONTAINER_IMAGE=${IMAGE} here; get it on this host (\`apptainer pull ${IMAGE}"* ]]
  touch "${IMAGE}"
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  [[ "$(grep "w0/repo/cluster/lib/inside.sh ray start" "${SITE}/engine_calls")" == \
    "apptainer exec --cleanenv --bind ${SITE}/w0 --bind "*" --pwd ${SITE}/w0/repo ${IMAGE} bash "* ]]
  [ "$(grep -c "token=[0-9a-f]\{64\}" "${SITE}/ray_calls")" -eq 3 ]
}

@test "more words for the engine come before the image, those of a host instead of the block's" {
  sed -i 's|^w1 |w1 container_options="--shm-size 8g" |' "${HOSTS_FILE}"
  sed -i 's|CONTAINER_OPTIONS=()|CONTAINER_OPTIONS=(-v "/a b:/a b")|' "${SCRIPT}"
  "${SCRIPT}" setup
  [[ "$(runs w0)" == *" -v /a\\ b:/a\\ b ${IMAGE} bash "* ]]
  [[ "$(runs w1)" == *" --shm-size 8g ${IMAGE} bash "* ]]
}

@test "an image that a host does not have is named with the remedy, and nothing is pulled" {
  touch "${SITE}/w1/no_image"
  run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w1: container: docker has no CONTAINER_IMAGE=${IMAGE} here; get it on this host (\`docker pull\`)"* ]]
  [[ "${output}" == *"w1: left out"* && "${output}" == *"2 of 3 nodes joined"* ]]
  run ! grep -w -e "docker pull" "${SITE}/engine_calls"
}

@test "an engine that does not work, another image and a missing engine are said" {
  echo sha256:22 >"${SITE}/w0/image_id"
  run "${SCRIPT}" doctor
  [[ "${output}" == *"warning: w0: container: ${IMAGE} is another image than on the head (sha256:22, sha256:11)"* ]]
  touch "${SITE}/engine_down"
  run "${SCRIPT}" doctor
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w0: container: CONTAINER_IMAGE=${IMAGE}: docker does not work: Cannot connect to the daemon"* ]]
  CONTAINER_ENGINE=apptainer run "${SCRIPT}" doctor
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no apptainer here; install or repair it"* ]]
}

@test "status, doctor and a shell that sources env have the programs of the image" {
  "${SCRIPT}" setup
  : >"${SITE}/engine_calls"
  run "${SCRIPT}" status
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"alive"*"alive"*"alive"* ]]
  grep -q " run .*inside.sh python -c" "${SITE}/engine_calls"
  run "${SCRIPT}" doctor
  [[ "${output}" == *"doctor in ${SITE}/${HEAD}/repo with RAY_AUTH_MODE=token: doctor"* ]]
  cd "${SITE}/${HEAD}/repo"
  # shellcheck disable=SC2016 # for the other shell
  run env HOME="${SITE}/${HEAD}" TACO_RATIO=0.25 bash -c '. "${HOME}"/.verl_mixed/*/env && verl-mixed plan'
  [[ "${output}" == *"doctor in ${SITE}/${HEAD}/repo with RAY_AUTH_MODE=token: plan"* ]]
  grep -q " --env TACO_RATIO .*inside.sh verl-mixed plan" "${SITE}/engine_calls"
}

@test "sync makes no environment on the hosts" {
  sed -i '/^venv=/d' "${HOSTS_FILE}"
  rm -rf "${SITE}/w0/repo/cluster"
  git -C "${CHECKOUT}" init -q
  run "${SCRIPT}" sync
  [ "${status}" -eq 0 ]
  [ -e "${SITE}/w0/repo/cluster/lib/inside.sh" ]
  [ ! -e "${SITE}/w0/repo/.venv" ]
}

@test "stop ends the containers of this cluster on its hosts, and no other" {
  "${SCRIPT}" setup
  sleep 300 &
  foreign=$!
  sleep 300 &
  ours=$! # what a crash of tmux left
  printf '%s\n' "${foreign}" label=verl_mixed.cluster=other label=verl_mixed.node=other/fd00::2 >"${CONTAINERS}/foreign"
  printf '%s\n' "${ours}" "label=verl_mixed.cluster=${HEAD}" "label=verl_mixed.node=${HEAD}/fd00::2" >"${CONTAINERS}/left"
  run "${SCRIPT}" cleanup --yes
  [ "${status}" -eq 0 ]
  ended "${ours}"
  run ! ended "${foreign}"
  kill "${foreign}"
  for name in head node0 node1; do ended "$(pid_of "${name}")"; done
  [ ! -e "${SITE}/w0/.verl_mixed" ]
}

@test "a container of the same name that a restarted machine kept is removed before the new one" {
  sleep 300 &
  old=$!
  printf '%s\n' "${old}" "label=verl_mixed.cluster=${HEAD}" "label=verl_mixed.node=${HEAD}/fd00::3" \
    >"${CONTAINERS}/verl_mixed_${HEAD}_node1"
  run "${SCRIPT}" setup
  [ "${status}" -eq 0 ]
  ended "${old}"
}

@test "another image, engine or range of ports is not in force before a restart" {
  "${SCRIPT}" setup
  IMAGE=other CONTAINER_IMAGE=other run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"Ray is up with another CONTAINER_IMAGE"* ]]
}

@test "RAY_WORKER_PORTS pins every port of a node" {
  unset CONTAINER_IMAGE
  RAY_WORKER_PORTS=41000-41999 "${SCRIPT}" setup
  for role in "ray start --head" "ray start --address"; do
    words="$(grep "^${role}" "${SITE}/ray_calls" | head -n 1)"
    [[ "${words}" == *" --min-worker-port 41000 --max-worker-port 41999 --node-manager-port 42000 "* ]]
    [[ "${words}" == *" --object-manager-port 42001 --runtime-env-agent-port 42002 --dashboard-agent-listen-port 42003 "* ]]
    [[ "${words}" == *" --dashboard-agent-grpc-port 42004 --metrics-export-port 42005 "* ]]
  done
  grep -q "^ray start --head .* --ray-client-server-port 42006 " "${SITE}/ray_calls"
}

@test "a range of ports that is too short for the host's CPUs leaves the host out" {
  unset CONTAINER_IMAGE
  printf '#!/usr/bin/env bash\necho 200\n' >"${SITE}/bin/nproc"
  chmod +x "${SITE}/bin/nproc"
  RAY_WORKER_PORTS=41000-41099 run "${SCRIPT}" setup
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"bad: w0: worker ports: RAY_WORKER_PORTS=41000-41099 holds 100 ports, and the host has 200 CPUs: 232"* ]]
}
