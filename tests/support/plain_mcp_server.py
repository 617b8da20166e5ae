"""An MCP server without the SDK: python plain_mcp_server.py KIND LOG.

KIND `old` knows the handshake alone and ignores other requests, as servers written by hand do. `new` knows the
newest protocol alone. `odd` lists its tools in a wrong form. The methods of all requests go to the file LOG.
"""

import json
import sys
from pathlib import Path
from typing import Any

KIND = sys.argv[1]
LOG = Path(sys.argv[2])
CAPABILITIES: dict[str, Any] = {"tools": {}}
TOOL = {"name": "echo", "inputSchema": {"type": "object", "properties": {}}}


def result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request, None for one that this server does not know."""
    if method == "initialize" and KIND != "new":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": CAPABILITIES,
            "serverInfo": {"name": "plain", "version": "1"},
        }
    if method == "server/discover" and KIND == "new":
        version = params["_meta"]["io.modelcontextprotocol/protocolVersion"]
        return {
            "resultType": "complete",
            "supportedVersions": [version],
            "capabilities": CAPABILITIES,
            "ttlMs": 0,
            "cacheScope": "private",
        }
    if method == "tools/list":
        tools: Any = [TOOL]
        if KIND == "odd":
            tools = "echo"
        return {"resultType": "complete", "tools": tools, "ttlMs": 0, "cacheScope": "private"}
    return None


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    with LOG.open("a") as log:
        print(message["method"], file=log)
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    content = result(message["method"], message.get("params") or {})
    if content is not None:
        print(json.dumps({**answer, "result": content}), flush=True)
    elif KIND == "new":
        error = {"code": -32601, "message": "Method not found"}
        print(json.dumps({**answer, "error": error}), flush=True)
