"""Chat templates that compute or grow without end: each ends with an error, soon and in little memory."""

import subprocess
import sys
import threading
import time

import jinja2
import pytest

from headrace.core.types.errors import ConfigError, HeadraceError
from headrace.engine.model.stub import stub_tokenizer
from headrace.text import template_limits
from headrace.text.chat_template import REFUSALS, ChatTemplate
from headrace.text.template_limits import CPU_SECONDS, MAX_SOURCE, TemplateLimit
from headrace.text.tokenizer import Tokenizer, load_tokenizer

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LARGE = {
    "power": "{{ 10 ** (10 ** 7) }}",
    "power of a power": "{% set x = 10 ** 1000 %}{{ x ** 1000 }}",
    "product": "{% set ns = namespace(x=2 ** 64) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "repetition of a list": "{{ ([1] * 10 ** 10) | length }}",
    "repetition from the left": "{{ 1000000000000 * 'a' }}",
    "doubled by +": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled block": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
    "doubled macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}"
    "{% for i in range(99) %}{% set ns.x = d(ns.x) %}{% endfor %}",
    "written text": LOOP.replace("BODY", "x" * 10_000),
    "written text in a macro": "{% macro m() %}" + LOOP.replace("BODY", "x" * 10_000) + "{% endmacro %}{{ m() }}",
    "kept slices": "{% set big = 'x' * 9999999 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [big[1:]] %}{% endfor %}",
    "kept filters": "{% set big = 'x' * 9999999 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [big | upper] %}{% endfor %}",
    "format with %": "{{ '%1000000000d' % 1 }}",
    "format with % and a width": "{{ '%*d' % (1000000000, 1) }}",
    "format with % of a text": "{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format method with a width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format method of a text": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "format_map": "{{ ('{a}' * 99999).format_map({'a': 'x' * 99999}) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(width) if false else 'a'.ljust(1000000000) }}",
    "zfill": "{{ '1'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(60000) }}",
    "replace": "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "replace method": "{{ ('a' * 999999).replace('', 'b' * 999999) }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "join method": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "join of a text": "{{ ('a' * 99999) | join('x' * 99999) }}",
    "indent": "{{ ('\n' * 99999) | indent('x' * 99999) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "round": "{{ 1.5 | round(1000000000) }}",
    "round up": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "tojson with an indentation": "{{ [1] | tojson(indent=2000000000) }}",
    "tojson with a text as indentation": "{{ [1] | tojson(indent='x' * 9999999) }}",
    "tojson with separators": "{{ [1, 2] | tojson(separators=('x' * 9999999, 'y')) }}",
    "tojson, deep": "{% set ns = namespace(x=[1] * 99999) %}"
    "{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=60) }}",
    "nested, written": NESTED + "{{ ns.x }}",
    "nested, as JSON": NESTED + "{{ ns.x | tojson }}",
    "nested, as text": NESTED + "{{ ns.x | string }}",
    "nested, joined": NESTED + "{{ [ns.x] | join }}",
    "nested, by ~": NESTED + "{{ ns.x ~ '' }}",
    "nested, compared": NESTED + "{% set a = ns.x %}" + NESTED + "{{ a == ns.x }}",
    "nested, tested": NESTED + "{% set a = ns.x %}" + NESTED + "{{ a is eq(ns.x) }}",
    "nested, found": NESTED + "{% set a = ns.x %}" + NESTED + "{{ [a].index(ns.x) }}",
    "nested, in an error": NESTED + "{{ raise_exception(ns.x) }}",
    "nested, formatted": NESTED + "{{ '%s' % [ns.x] }}",
    "nested, as keys": NESTED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[1]", "(1,)") + "{{ {ns.x: 1} }}",
    "sum of lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
    "loop": LOOP.replace("BODY", ""),
    "loop over a recursion": "{% for i in range(9999) recursive %}"
    "{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "work in filters": LOOP.replace("BODY", "{% set x = range(99999) | map('string') | list %}"),
    "map": "{{ range(99999) | map('center', 60000) | list | length }}",
}  # fmt: skip
PROGRAM = """
import resource, sys, time
from headrace.text import template_limits
from headrace.text.chat_template import REFUSALS, ChatTemplate
from tests.text.test_template_limits import LARGE
template_limits.CPU_SECONDS = 0.1
for name in sys.argv[1:]:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    began = time.process_time()
    try:
        ChatTemplate(LARGE[name], {}).render([{"role": "user", "content": "hi"}])
        print(name, "was rendered")
    except REFUSALS as error:
        if type(error).__name__ != "TemplateLimit":
            print(name, repr(error)[:200])
    if (took := time.process_time() - began) > 2:
        print(name, "took", took)
"""


def test_no_template_takes_more_than_its_time_and_memory() -> None:
    """In a process that may have 4 GiB of addresses: what is not refused in time does not end, or ends it."""
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, *LARGE], capture_output=True, text=True, check=False, timeout=600
    )
    assert (child.stdout, child.returncode) == ("", 0), child.stderr[-2000:]


def test_time_is_measured_in_every_rendering_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.1)
    made = ChatTemplate("{% if messages[0].content == 'x' %}" + LARGE["loop"] + "{% endif %}ok", {})
    for _ in range(2):
        with pytest.raises(TemplateLimit, match=r"it takes more than 0\.1 seconds"):
            made.render([{"content": "x"}])
        assert made.render([{"content": "y"}]) == "ok"


def test_other_threads_go_on_beside_a_template_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.3)
    made = ChatTemplate(LARGE["loop"], {})
    steps, over = [0], threading.Event()

    def count() -> None:
        while not over.wait(0.001):
            steps[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(TemplateLimit):
            made.render([{"content": "x"}])
    finally:
        over.set()
        thread.join()
    assert steps[0] > 5


def test_long_conversations_are_rendered() -> None:
    """Of a megabyte, with loops in loops."""
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for t in m.content.split(' ')[:20] %}"
        "{% set ns.n = ns.n + t|length %}{% endfor %}{{ '<|' ~ m.role ~ '|>' + m['content'] + ('%d' % ns.n) }}\n"
        "{% endfor %}{{ messages | tojson(indent=4) }}"
    )
    messages = [{"role": "user", "content": "some words of a text " * 50} for _ in range(1000)]
    began = time.thread_time()
    assert len(ChatTemplate(source, {}).render(messages)) > 2_000_000
    assert time.thread_time() - began < CPU_SECONDS / 3


@pytest.mark.parametrize(
    "expression",
    ["1 / 0", "'{0}'.format()", "2.0 ** 9999", "messages.x.y", "'%d' % 'a'", "1e400"],
)
def test_whatever_goes_wrong_is_a_refusal(expression: str) -> None:
    made = Tokenizer(stub_tokenizer("stub"), (), ChatTemplate("{{ " + expression + " }}", {}))
    with pytest.raises(HeadraceError, match="the model's chat template refuses these messages"):
        made.encode_chat([{"role": "user", "content": "hi"}])
    assert isinstance(ZeroDivisionError(), REFUSALS)


@pytest.mark.parametrize(
    "source",
    [
        "{% if",
        "{{ 'a' | no_such_filter }}",
        "{{ 'a' is no_such_test }}",
        "{{ 'a' | urlize }}",
        "{{ " + "9" * 5000 + " }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
        " " * (MAX_SOURCE + 1),
    ],
)
def test_what_cannot_be_compiled_stops_the_start(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate(source, {}).check()
    monkeypatch.setattr("headrace.text.tokenizer.CHAT_TEMPLATE", source)
    with pytest.raises(ConfigError, match=r"the chat template of stub cannot be used: .* by --chat-template FILE"):
        load_tokenizer("stub", "")
