"""How a model marks its reasoning, told by its chat template and vocabulary, and where an answer begins."""

import pytest

from headrace.core.config.server import ReasoningFormat
from headrace.text.answers.reasoning import FORMS, Opening, opening_of, reasoning_form

# The passages of the families' templates that say so.
TEMPLATES: list[tuple[str, ReasoningFormat | None]] = [
    ("{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}", "think"),  # Qwen3
    ("{{- '<|im_start|>assistant\\n<think>\\n' }}{% if '</think>' in content %}", "think"),  # Qwen3.5
    ("{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\\n'}}", "think"),  # DeepSeek R1
    ("{%- if not thinking %}{{'</think>'}}{%- endif %}", "think"),  # DeepSeek V3.1
    ("{{- '\\n<think></think>' -}}", "think"),  # GLM 4.5
    ("<think>{{render_content(message)}}</think>", "think"),  # Kimi K2 Thinking
    ('{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}', "harmony"),  # gpt-oss
    ("{{- '<|channel>thought\\n<channel|>' -}}", "gemma4"),
    ("[THINK]{{ block['thinking'] }}[/THINK]", "mistral"),
    ("{{ think_begin_token }}</seed:think>", "seed_oss"),
    ("{{ messages[0].content }}", None),
]


def no_token(_text: str) -> int | None:
    return None


@pytest.mark.parametrize(("template", "form"), TEMPLATES)
def test_templates_tell_the_form(template: str, form: ReasoningFormat | None) -> None:
    found = reasoning_form("auto", template, no_token)
    assert (found and found.format) == form
    assert reasoning_form("none", template, no_token) is None
    assert reasoning_form("kimi", template, no_token) == FORMS["kimi"]


@pytest.mark.parametrize("name", FORMS)
def test_a_vocabulary_tells_it_where_a_template_does_not(name: ReasoningFormat) -> None:
    ids = {mark: number for number, mark in enumerate(FORMS[name].marks)}
    assert reasoning_form("auto", "", ids.get) == FORMS[name]
    del ids[FORMS[name].marks[0]]
    assert reasoning_form("auto", "", ids.get) is None


@pytest.mark.parametrize(
    ("name", "end", "opening"),
    [
        ("think", "<|im_start|>assistant\n", "unsaid"),
        ("think", "<|im_start|>assistant\n<think>\n", "open"),
        ("think", "<｜Assistant｜><think>", "open"),
        ("think", "<｜Assistant｜></think>", "closed"),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("gemma4", "<|turn>model\n", "unsaid"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "open"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "closed"),
        ("harmony", "<|start|>assistant", "unsaid"),
        ("harmony", "hi<|end|>", "unsaid"),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", "open"),
    ],
)
def test_prompts_tell_where_an_answer_begins(name: ReasoningFormat, end: str, opening: Opening) -> None:
    assert opening_of(FORMS[name], end) == opening
