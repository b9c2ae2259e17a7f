# shellcheck shell=bash
# Words and exits shared by the scripts. Sourced; results go to stdout, words to stderr.

say() { printf '%s\n' "$*" >&2; }

# die CODE MESSAGE...: say why, and leave. 1: it failed here, 2: it was asked wrongly.
die() {
  local code="$1"
  shift
  say "error: $*"
  exit "${code}"
}

# usage FILE: a script's header is its --help.
usage() { sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p}' "$1"; }
