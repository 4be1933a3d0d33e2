"""The routes of the agents' APIs. What is behind them is loaded when one is first asked: most servers answer chats alone."""

from importlib import import_module

from penstock.engine.server.call import Call
from penstock.engine.server.endpoint import Handler, PostRoute, Reply
from penstock.engine.server.service import Service

RESPONSE = "/v1/responses/{response_id}"
ROUTES = (
    ("POST", "/v1/responses", "agents.items_api.responses"),
    ("POST", "/v1/responses/input_tokens", "agents.items_api.input_tokens"),
    ("GET", RESPONSE, "agents.stored_api.get"),
    ("DELETE", RESPONSE, "agents.stored_api.delete"),
    ("POST", f"{RESPONSE}/cancel", "agents.stored_api.cancel"),
    ("POST", "/v1/messages", "agents.messages_api.messages"),
    ("POST", "/v1/messages/count_tokens", "agents.messages_api.count_tokens"),
)
REMOVED = (
    f"{RESPONSE}/input_items",
    "/v1/conversations",
    "/v1/conversations/{rest:path}",
)  # each is a 400 that says so


def later(name: str) -> Handler:
    """The server's handler of this name, which is looked up when it is called."""
    module, _, function = name.rpartition(".")

    async def handle(service: Service, call: Call, body: bytes) -> Reply:
        handler: Handler = getattr(import_module(f"penstock.engine.server.{module}"), function)
        return await handler(service, call, body)

    return handle


def described() -> list[PostRoute]:
    """Those that have a schema, for the page that describes the API."""
    from penstock.engine.server.agents import items_api, messages_api
    from penstock.engine.server.agents.block_writer import MessageReply
    from penstock.engine.server.agents.item_writer import ItemsReply
    from penstock.engine.server.agents.items_schema import ItemsRequest, ResponsesRequest
    from penstock.engine.server.agents.messages_schema import CountRequest, MessagesRequest

    return [
        PostRoute("/v1/responses", items_api.responses, ResponsesRequest, ItemsReply, ItemsReply),
        PostRoute("/v1/responses/input_tokens", items_api.input_tokens, ItemsRequest, items_api.InputTokens),
        PostRoute("/v1/messages", messages_api.messages, MessagesRequest, MessageReply, MessageReply),
        PostRoute("/v1/messages/count_tokens", messages_api.count_tokens, CountRequest, messages_api.CountReply),
    ]
