#!/usr/bin/env bash
# Slurm's srun for one process on one node: its environment, output, exit code and signals, over ssh.
set -euo pipefail

while [[ "$1" == --* ]]; do
  [[ "$1" != --nodelist=* ]] || node="${1#*=}"
  shift
done
pid_file="$(mktemp -u /tmp/fake_srun.XXXXXX)"

# shellcheck disable=SC2317 # the traps call it
forward() { ssh -n "${node}" "kill -$1 \"\$(cat ${pid_file})\"" 2>/dev/null || true; }

script="$(
  declare -px | grep -v '^declare -x \(SSH_\|PWD=\|OLDPWD=\|SHLVL=\)'
  printf 'export SLURMD_NODENAME=%q\ncd -- %q\n' "${node}" "${PWD}"
  printf 'echo $$ >%s\n' "${pid_file}"
  printf 'exec'
  printf ' %q' "$@"
  printf ' </dev/null\n'
)"
for signal in TERM INT USR1; do
  # shellcheck disable=SC2064 # this signal, as it is now
  trap "forward ${signal}" "${signal}"
done
setsid ssh "${node}" bash -s <<<"${script}" &
code=0
wait $! || code=$?
while kill -0 $! 2>/dev/null; do # a signal ended the wait, not the process
  code=0
  wait $! || code=$?
done
ssh -n "${node}" rm -f -- "${pid_file}"
exit "${code}"
