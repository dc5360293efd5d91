"""What requests ask of chat templates, beside what transformers makes of the same."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.text.chat_template import REFUSALS, ChatTemplate, TemplateUse

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    "{% endif %}{{ reasoning_effort | default('medium') }}"
)
STRIPPED = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "tell me"},
    {"role": "assistant", "content": " It began "},
]


def theirs(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    rendered = render_jinja_template([messages], chat_template=template, **fields)
    return str(rendered[0][0])


@pytest.mark.parametrize("template", [PLAIN, STRIPPED])
@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "low"}]
)
@pytest.mark.parametrize("opens", [True, False])
def test_variables_and_openings(template: str, variables: dict[str, Any], opens: bool) -> None:
    found = ChatTemplate(template, {}).render(MESSAGES, use=TemplateUse(variables, opens))
    assert found == theirs(template, MESSAGES, add_generation_prompt=opens, **variables)


@pytest.mark.parametrize("template", [PLAIN, STRIPPED])
@pytest.mark.parametrize("content", ["It began", " It began ", "tell me", "It </> began\n"])
def test_a_message_that_is_continued(template: str, content: str) -> None:
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    found = ChatTemplate(template, {}).render(messages, use=TemplateUse(continues=True))
    assert found == theirs(template, messages, continue_final_message=True)
    assert found.rstrip().endswith(content.strip())


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (PLAIN, [], "no text to be continued"),
        (PLAIN, [{"role": "assistant", "content": None}], "no text to be continued"),
        ("{{ messages[0]['content'] }}", MESSAGES, "does not show the last message"),
    ],
)
def test_what_cannot_be_continued(template: str, messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(REFUSALS, match=words):
        ChatTemplate(template, {}).render(messages, use=TemplateUse(continues=True))
