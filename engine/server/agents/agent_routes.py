"""The routes of the agents' APIs. What is behind them is loaded when one is first asked: most servers answer chats alone."""

from importlib import import_module

from penstock.engine.server.call import Call
from penstock.engine.server.endpoint import Handler, PostRoute, Reply
from penstock.engine.server.service import Service

RESPONSE, CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
ITEM = f"{CONVERSATION}/items/{{item_id}}"
ROUTES = (
    ("POST", "/v1/responses", "agents.items_api.responses"),
    ("POST", "/v1/responses/input_tokens", "agents.items_api.input_tokens"),
    ("GET", RESPONSE, "agents.kept_api.get"),
    ("DELETE", RESPONSE, "agents.kept_api.delete"),
    ("POST", f"{RESPONSE}/cancel", "agents.kept_api.cancel"),
    ("GET", f"{RESPONSE}/input_items", "agents.kept_api.list_items"),
    ("POST", "/v1/conversations", "agents.kept_api.create_conversation"),
    ("GET", CONVERSATION, "agents.kept_api.get"),
    ("POST", CONVERSATION, "agents.kept_api.change_conversation"),
    ("DELETE", CONVERSATION, "agents.kept_api.delete"),
    ("GET", f"{CONVERSATION}/items", "agents.kept_api.list_items"),
    ("POST", f"{CONVERSATION}/items", "agents.kept_api.add_items"),
    ("GET", ITEM, "agents.kept_api.get_item"),
    ("DELETE", ITEM, "agents.kept_api.delete_item"),
    ("POST", "/v1/messages", "agents.messages_api.messages"),
    ("POST", "/v1/messages/count_tokens", "agents.messages_api.count_tokens"),
)


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
