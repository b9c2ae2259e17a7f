"""The tools that the model of a source may call: this project's, Python functions, MCP, verl's.

Each tool is a JSON schema (`ToolSpec`) and something that answers (`Tool`). Every call goes through
the tool client (`agent_loop.calls.client`): limiter, slots, deadline, retries, cache, typed faults.
"""
