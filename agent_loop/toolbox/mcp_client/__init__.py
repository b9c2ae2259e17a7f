"""Connections to MCP servers: over stdio (`stdio`) or streamable HTTP (`http`), by the SDK `mcp`.

The SDK takes more than a second to import, so functions import it when a server is started.
"""
