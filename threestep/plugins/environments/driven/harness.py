"""The chat loop of verifiers in this process, in place of its program in a process of its own for each conversation.

Serves `verifiers`, whose loader imports it by the name that `verifiers_tasks` gives it. As the loop of verifiers
(harness `null`): a request, the calls of the answer, their results, until an answer calls nothing.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ThreestepHarness"]


class ThreestepHarness(Harness[HarnessConfig]):
    """No tools of its own: those of the task and the taskset."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: D102 - the base class's
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0)))
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                response = await client.post(
                    f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
                if response.is_error:  # a limit or a @stop of verifiers, which the trace has; or an error of the model
                    return ProgramResult(1, "", f"{response.status_code}: {response.text[:500]}")
                message = response.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    content = await _result(connected, dispatch, call["function"])
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "name": call["function"]["name"],
                            "content": content,
                        }
                    )


async def _result(servers: Any, dispatch: dict[str, Any], function: dict[str, Any]) -> Any:
    """A call's result, or an error for the model."""
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
        return await call_mcp(servers, dispatch, function["name"], arguments)
    except Exception as problem:  # noqa: BLE001 - whatever a tool of a user raises, the model reads of it
        return f"error: {type(problem).__name__}: {problem}"
