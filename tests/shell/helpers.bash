# shellcheck shell=bash
# A checkout with the scripts alone, and a python3.11 first on PATH that records its calls and installs nothing.

REPO_ROOT="$(cd -- "${BATS_TEST_DIRNAME}/../.." && pwd)"

make_checkout() {
  CHECKOUT="${BATS_TEST_TMPDIR}/checkout"
  mkdir -p "${CHECKOUT}/cluster" "${BATS_TEST_TMPDIR}/bin"
  cp -r "${REPO_ROOT}/requirements" "${CHECKOUT}/requirements"
  cp -r "${REPO_ROOT}/cluster/lib" "${CHECKOUT}/cluster/lib"
  cp "${REPO_ROOT}/pyproject.toml" "${REPO_ROOT}/run_mixed_training.sh" "${REPO_ROOT}/run_tests.sh" "${CHECKOUT}"
  export CALLS="${BATS_TEST_TMPDIR}/calls"
  : >"${CALLS}"
  cat >"${BATS_TEST_TMPDIR}/bin/python3.11" <<'FAKE'
#!/usr/bin/env bash
echo "python $*" >>"${CALLS}"
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/verl-mixed"
    sed -i 's/"python \$\*"/"verl-mixed $* PROFILE=${PROFILE} TACO_RATIO=${TACO_RATIO}"/' "$3/bin/verl-mixed"
    ;;
  "-m pip") exit "${PIP_EXIT:-0}" ;;
esac
exit 0
FAKE
  chmod +x "${BATS_TEST_TMPDIR}/bin/python3.11"
  export PATH="${BATS_TEST_TMPDIR}/bin:${PATH}"
  unset PYTHON PROFILE TACO_RATIO CONDA_ENV CONDA_PATH TORCH_INDEX_URL
}

# calls WORD: how many recorded calls hold this word.
calls() { grep -c -- "$1" "${CALLS}" || true; }
