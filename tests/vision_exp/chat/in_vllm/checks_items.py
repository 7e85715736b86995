"""Items of the Responses API that are no messages, over HTTP with the official client."""

from __future__ import annotations

from typing import Any

from checks_clients import LARGE, URL, Api, error_of

MESSAGE = {"role": "user", "content": "What is shown?"}
SEEN = {"type": "input_image", "image_url": URL}
SHOT = {"type": "computer_screenshot", "image_url": LARGE}
#: Items of which vLLM makes no message; some hold an image.
ITEMS: tuple[dict[str, Any], ...] = (
    {"type": "computer_call_output", "call_id": "c", "output": SHOT},
    {"type": "image_generation_call", "id": "i", "status": "completed", "result": LARGE},
    {"type": "item_reference", "id": "m_1"},
    {"type": "file_search_call", "id": "f", "queries": ["a"], "status": "completed"},
    {"type": "local_shell_call_output", "id": "s", "output": "done"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    # These become objects of vLLM's, not dicts.
    {"type": "custom_tool_call_output", "call_id": "c", "id": "o", "output": [SEEN]},
    {"type": "code_interpreter_call", "id": "i", "code": "a", "container_id": "c"}
    | {"status": "completed", "outputs": [{"type": "image", "url": LARGE}]},
)


def check_items_without_a_role_are_named(api: Api) -> None:
    make = api.client.responses.create
    for item in ITEMS:
        for items in ([item], [MESSAGE, item], [item, MESSAGE], [MESSAGE, item, MESSAGE]):
            error = error_of(lambda given=items: make(model=api.model, input=given))
            assert item["type"] in str(error), error
    # The next one is served.
    make(model=api.model, input=[{"role": "user", "content": [SEEN]}], max_output_tokens=1)
    assert api.last_images() == 1
