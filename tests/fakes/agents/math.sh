#!/bin/sh
# An agent for rows of math: asks the model with the tool `calculate`, calls it, and sends the result back. The last
# line that it prints is its answer. curl and python3 (for JSON) are all that it needs.
#
# Usage: math.sh, as a command of the gateway's agent loop: agent_loops.<name>.command="sh tests/fakes/agents/math.sh"
# Environment: OPENAI_BASE_URL, OPENAI_API_KEY, MIXED_MCP_URL and MIXED_ROW_FILE, as each session gets them
set -eu

TOOLS='[{"type": "function", "function": {"name": "calculate",
  "description": "the value of an arithmetic expression", "parameters": {"type": "object",
  "properties": {"expression": {"type": "string", "description": "as in 2 * (3 + 4)"}}, "required": ["expression"]}}}]'
MAX_TURNS=3
TAB="$(printf '\t')"

# json EXPRESSION [WORD]: the Python expression as JSON, of the JSON `it` on stdin and the word `word`.
json() {
  python3 -c "import json, sys; it, word = json.load(sys.stdin), sys.argv[1]; print(json.dumps($1))" "${2:-}"
}

# post URL: the answer to the JSON on stdin.
post() {
  curl --silent --show-error --fail-with-body --max-time 60 --data-binary @- \
    --header "Authorization: Bearer ${OPENAI_API_KEY}" --header "Content-Type: application/json" "$1"
}

# calls_of MESSAGE: a line for each call: its id, and the parameters of an MCP request.
calls_of() {
  printf '%s' "$1" | python3 -c '
import json, sys
for call in json.load(sys.stdin).get("tool_calls") or []:
    function = call["function"]
    params = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    print(call["id"], json.dumps(params), sep="\t")'
}

messages="$(json 'it["prompt"]' <"${MIXED_ROW_FILE}")"
turn=0
while [ "${turn}" -lt "${MAX_TURNS}" ]; do
  turn=$((turn + 1))
  message="$(printf '{"model": "policy", "messages": %s, "tools": %s}' "${messages}" "${TOOLS}" |
    post "${OPENAI_BASE_URL}/chat/completions" | json 'it["choices"][0]["message"]')"
  messages="${messages%]}, ${message}]"
  calls="$(calls_of "${message}")"
  [ -n "${calls}" ] || break
  while IFS="${TAB}" read -r id params; do
    result="$(printf '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": %s}' "${params}" |
      post "${MIXED_MCP_URL}" |
      json '{"role": "tool", "tool_call_id": word, "content": it["result"]["content"][0]["text"]}' "${id}")"
    messages="${messages%]}, ${result}]"
  done <<EOF
${calls}
EOF
done
printf '%s' "${message}" | python3 -c 'import json, sys; print(*(json.load(sys.stdin)["content"] or "").split())'
