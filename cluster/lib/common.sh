# shellcheck shell=bash
# Messages and exits for all scripts. This file is sourced. Results go to stdout, messages to stderr.

say() { printf '%s\n' "$*" >&2; }

# die CODE MESSAGE...: print the message and exit. CODE 1: something failed; 2: a setting or the usage is wrong.
die() {
  local code="$1"
  shift
  say "error: $*"
  exit "${code}"
}

# usage FILE: print the header comment of a script, which is its --help.
usage() { sed -n '2,/^[^#]/{/^#/!d;s/^# \{0,1\}//;p}' "$1"; }
