"""POST /v1/messages and /v1/messages/count_tokens: converts Anthropic's Messages to a chat request and answers it."""

import re
from typing import Any

from msgspec import Raw

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server import prompts, requests
from penstock.engine.server.agents import messages_schema as schema
from penstock.engine.server.agents.block_writer import BlockWriter
from penstock.engine.server.agents.items import chat_tools, own_tools
from penstock.engine.server.answer_writer import respond
from penstock.engine.server.call import Call
from penstock.engine.server.chat import ask
from penstock.engine.server.conversation import Conversation, check_braces
from penstock.engine.server.endpoint import Reply
from penstock.engine.server.other_fields import decode_lenient
from penstock.engine.server.service import Service
from penstock.engine.text.chat_messages import TextPart
from penstock.engine.text.prompt import thinking_switch

PATHS = {  # the chat API's field → the field in this API
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tool_choice.function": "tool_choice",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code's first system block, which differs for each conversation, so that none would share a prefix with another.
BILLING_LINE = re.compile(r"x-anthropic-billing-header:.*\n?")
SAME = requests.CHAT_FIELDS & {*schema.MessagesRequest.__struct_fields__}


async def messages(service: Service, call: Call, body: bytes) -> Reply:
    """Answer a conversation of blocks."""
    request = service.accept(call, body, schema.MessagesRequest)
    chat, conversation = _chat(service, call, request, len(body))
    plan = await ask(service, call, chat, conversation)
    writer = BlockWriter(call, plan, is_stream=bool(request.stream))
    return await respond(service, call, writer)


async def count_tokens(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Return how many tokens the prompt of a message would have."""
    request = service.accept(call, body, schema.CountRequest)
    chat, conversation = _chat(service, call, request, len(body))
    return {"input_tokens": await prompts.count_tokens(chat, conversation, service)}


def _chat(
    service: Service, call: Call, request: schema.CountRequest, size_bytes: int
) -> tuple[requests.ChatRequest, Conversation]:
    """Convert the request to a chat. `size_bytes`: size of the body."""
    check_braces("messages", request.messages, service.info)
    given = decode_lenient(list[schema.BlockMessage], request.messages, "messages", call.ignored)
    if not given:
        raise InvalidRequest("messages", "at least one is needed")
    if given[-1].role == "assistant" and not given[-1].content and len(given) > 1:
        given.pop()  # an empty assistant message begins no answer
    conversation = Conversation(size_bytes, {})
    system = request.system or ""
    if isinstance(system, list) and BILLING_LINE.fullmatch(system[0].text):
        system = system[1:]
    if text := _text(system):
        conversation.say("system", "system", text, "")
    for index, message in enumerate(given):
        _add(conversation, f"messages[{index}]", message)
    call.paths |= PATHS | conversation.paths
    call.paths["continue_final_message"] = f"messages[{len(given) - 1}].content"
    fields: dict[str, Any] = {name: getattr(request, name, None) for name in SAME}
    # A last message of the assistant is the beginning of the answer, which the model continues.
    fields["continue_final_message"] = True if given[-1].role == "assistant" else None
    tools = own_tools(request.tools, schema.BlockTool, schema.VENDOR_TOOLS, call.ignored)
    fields |= _options(request) | {"tools": chat_tools(tools, call.paths, "input_schema")}
    return requests.ChatRequest(messages=Raw(), **fields), conversation


def _add(chat: Conversation, path: str, message: schema.BlockMessage) -> None:
    """Add an assistant's blocks as one message, and each tool result as a separate message between the texts."""
    content = message.content or ("" if message.role == "assistant" else [])  # an answer may have been empty
    blocks = [schema.TextBlock(text=content)] if isinstance(content, str) else content
    if not blocks:
        raise InvalidRequest(f"{path}.content", "at least one block is needed")
    texts: list[TextPart] | None = None
    for index, block in enumerate(blocks):
        at = f"{path}.content[{index}]"
        owner = "user" if isinstance(block, schema.ToolResultBlock) else "assistant"
        if message.role != owner and not isinstance(block, schema.TextBlock):
            raise InvalidRequest(f"{at}.type", f"only messages of the {owner} have it; the role is {message.role!r}")
        if isinstance(block, schema.TextBlock):
            if texts is None:
                texts = []
                chat.say(path, message.role, texts)
            texts.append(TextPart("text", block.text))
        elif isinstance(block, schema.ThinkingBlock):
            chat.think(path, block.thinking)
            texts = None if block.thinking else texts  # text after it begins another message
        elif isinstance(block, schema.ToolUseBlock):
            chat.call(at, block.id, block.name, block.input)
        else:
            error = "Error: " if block.is_error else ""  # templates cannot mark errors in any other way
            chat.result(at, block.tool_use_id, error + _text(block.content), "tool_use_id")
            texts = None


def _text(content: str | list[schema.TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _options(request: schema.CountRequest) -> dict[str, Any]:
    """Return the chat fields that have another name or form in this API."""
    fields: dict[str, Any] = {"stop": getattr(request, "stop_sequences", None)}
    if (thinking := request.thinking) is not None:
        fields["chat_template_kwargs"] = thinking_switch(thinking.type != "disabled")
        fields["include_reasoning"] = thinking.type != "disabled" and thinking.display != "omitted"
    if (choice := request.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequest("tool_choice.name", "needed with the type 'tool', and only there")
        named = None if choice.name is None else requests.NamedTool(requests.FunctionName(choice.name))
        fields["tool_choice"] = named or CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (config := request.output_config) is not None:
        fields["reasoning_effort"] = config.effort
        if config.format is not None:
            fields["response_format"] = requests.ResponseFormat(
                "json_schema", requests.JsonSchema(config.format.schema)
            )
    return fields
