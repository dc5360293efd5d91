"""Fields of bodies with messages that are for the chat template."""

from typing import Any

import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.api.request.prompts import template_use
from headrace.server.api.request.schema import ChatBody, ChatMessage, PrefillBody, TokenizeBody
from headrace.text.chat_template import TemplateUse

MESSAGES = [ChatMessage(role="user", content="hi")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, TemplateUse({})),
        ({"chat_template_kwargs": {"enable_thinking": False}}, TemplateUse({"enable_thinking": False})),
        ({"reasoning_effort": "low"}, TemplateUse({"enable_thinking": True, "reasoning_effort": "low"})),
        ({"reasoning_effort": "none"}, TemplateUse({"enable_thinking": False, "reasoning_effort": "none"})),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            TemplateUse({"enable_thinking": True, "reasoning_effort": "none"}),
        ),
        ({"add_generation_prompt": False}, TemplateUse({}, opens=False)),
        ({"continue_final_message": True}, TemplateUse({}, continues=True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, TemplateUse({}, False, True)),
    ],
)
def test_fields_are_what_the_template_gets(fields: dict[str, Any], expected: TemplateUse) -> None:
    for kind in (ChatBody, PrefillBody, TokenizeBody):
        assert template_use(kind(messages=MESSAGES, **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "send messages beside"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "send tools beside"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b", "no template has a variable"),
        ({"chat_template_kwargs": {"x" * 65: 1}}, "chat_template_kwargs." + "x" * 65, "no template has a variable"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "contradict each other",
        ),
    ],
)
def test_what_contradicts_itself_is_named(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(HeadraceError) as raised:
        template_use(ChatBody(messages=MESSAGES, **fields))
    assert (raised.value.info.status, raised.value.info.field) == (400, field)
    assert words in raised.value.info.message
