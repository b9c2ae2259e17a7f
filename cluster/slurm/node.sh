#!/usr/bin/env bash
# What cluster/slurm/mixed_training.sbatch starts on a node through srun. Its settings come from there.
#
# Usage: node.sh address               print the address of this node for the others
#        node.sh head | worker NAME    Ray in the foreground, until TERM; then its temporary folder goes. Ray that ends is
#                                      started again while the file KEEP_UP is there
#        node.sh wait SECONDS NAME...  until these nodes are alive; 1 when the time is over
#        node.sh run WORD...           run_mixed_training.sh
set -euo pipefail

# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/bootstrap.sh
source "${REPO_ROOT}/cluster/lib/bootstrap.sh"
# shellcheck source=cluster/lib/ports.sh
source "${REPO_ROOT}/cluster/lib/ports.sh"

# own_address: what this node's name means to the others; else the address of its first interface.
own_address() {
  local address
  if [[ -z "${NODE_IP:-}" ]]; then
    address="$(getent ahostsv4 "${SLURMD_NODENAME:-$(hostname)}" | awk '$1 !~ /^127\./ { print $1; exit }')" || true
    NODE_IP="${address:-$(hostname -I | cut -d' ' -f1)}"
  fi
  [[ -n "${NODE_IP}" ]] || die 1 "$(hostname): it has no address besides 127.0.0.1; set NODE_IP"
}

# hold_ray WORD...: `ray start WORD... --block` until TERM or its own end; removes RAY_TEMP_DIR, which is this job's. A job
# that was requeued after its node died finds its own folder there.
hold_ray() {
  local code=0
  RAY_WORKER_PORTS="${RAY_WORKER_PORTS:-}" ray_ports
  local -a words=("$@" --node-ip-address "${NODE_IP}" --node-name "${NAME}"
    --temp-dir "${RAY_TEMP_DIR}" "${PORT_WORDS[@]}" --disable-usage-stats --block)
  [[ -z "${NUM_CPUS:-}" ]] || words+=(--num-cpus "${NUM_CPUS}")
  [[ -z "${NUM_GPUS:-}" ]] || words+=(--num-gpus "${NUM_GPUS}")
  ((${SLURM_RESTART_COUNT:-0} == 0)) || [[ "${RAY_TEMP_DIR##*/}" != "verl_mixed_ray_${SLURM_JOB_ID}" ]] ||
    rm -rf -- "${RAY_TEMP_DIR}"
  (umask 077 && mkdir -p -- "$(dirname -- "${RAY_TEMP_DIR}")" && mkdir -- "${RAY_TEMP_DIR}" "${RAY_TEMP_DIR}/tmp") ||
    die 1 "RAY_TEMP_DIR=${RAY_TEMP_DIR} is on $(hostname) already: another job's? choose another, or remove it"
  export TMPDIR="${RAY_TEMP_DIR}/tmp" # what workers leave goes with it
  # a session of its own, because keep_up ends what is left of its session
  # shellcheck disable=SC2016 # for the inner shell
  setsid bash -c '. "$1"; keep_up "${@:2}"' keep_up "${REPO_ROOT}/cluster/lib/keep_up.sh" "${KEEP_UP}" \
    ray start "${words[@]}" &
  RAY_PID=$!
  trap 'kill -TERM "${RAY_PID}" 2>/dev/null' TERM INT
  trap 'rm -rf -- "${RAY_TEMP_DIR}"' EXIT
  wait "${RAY_PID}" || code=$?
  while kill -0 "${RAY_PID}" 2>/dev/null; do # a signal ended the wait, not Ray
    wait "${RAY_PID}" || true
  done
  exit "${code}"
}

# wait_for SECONDS NAME...: a line per node as it joins. Ray retries for longer where a token is refused.
wait_for() {
  export RAY_ADDRESS="${HEAD_IP}:${RAY_PORT}"
  exec timeout $(($1 + 20)) python -m cluster.ray_nodes wait "$@"
}

# use_image: in a container, VENV is the Python of the image unless it names another environment there.
use_image() {
  [[ -n "${CONTAINER_IMAGE:-}" ]] || return 0
  export PYTHONNOUSERSITE=1 # packages below the home folder are the host's
  export VENV="${VENV:-$(python -c 'import sys; print(sys.prefix)')}"
}

main() {
  NAME="${2:-}"
  cd -- "${REPO_ROOT}"
  case "${1:-}" in
    address)
      own_address
      printf '%s\n' "${NODE_IP}"
      return
      ;;
  esac
  use_image
  bootstrap run
  case "${1:-}" in
    head)
      own_address
      hold_ray --head --port "${RAY_PORT}" --ray-client-server-port "${RAY_CLIENT_PORT}" --include-dashboard true \
        --dashboard-host 127.0.0.1 --dashboard-port "${RAY_DASHBOARD_PORT}"
      ;;
    worker)
      own_address
      hold_ray --address "${HEAD_IP}:${RAY_PORT}"
      ;;
    wait) wait_for "${@:2}" ;;
    run) exec "${REPO_ROOT}/run_mixed_training.sh" "${@:2}" ;;
    *) die 2 "unknown word '${1:-}': see the head of ${BASH_SOURCE[0]}" ;;
  esac
}

main "$@"
