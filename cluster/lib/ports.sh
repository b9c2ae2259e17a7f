# shellcheck shell=bash
# The ports of Ray on a node. This file is sourced, and sent to a host before node.sh.

# ray_ports: PORT_WORDS becomes the words of `ray start` for the ports of this node. With RAY_WORKER_PORTS all are pinned: the
# workers' are that range, and those of the node's own services come after it, in this order; the head's client server is
# the seventh. The head's metrics are always on Ray's 44217 and 44227 (AUTOSCALER_METRIC_PORT, DASHBOARD_METRIC_PORT). NODE_PORTS of cluster/inventory.py is their number, and docs/cluster.md has the table.
ray_ports() {
  local last="${RAY_WORKER_PORTS#*-}"
  PORT_WORDS=(--dashboard-agent-listen-port 0)
  [[ -n "${RAY_WORKER_PORTS}" ]] || return 0
  # shellcheck disable=SC2034 # node.sh and cluster/slurm/node.sh read it
  PORT_WORDS=(--min-worker-port "${RAY_WORKER_PORTS%-*}" --max-worker-port "${last}"
    --node-manager-port "$((last + 1))" --object-manager-port "$((last + 2))" --runtime-env-agent-port "$((last + 3))"
    --dashboard-agent-listen-port "$((last + 4))" --dashboard-agent-grpc-port "$((last + 5))"
    --metrics-export-port "$((last + 6))")
}
