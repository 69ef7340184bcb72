from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.chat_template import ChatTemplate, TemplateError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & clear."},
    {"role": "user", "content": "Grüße, 你好 😀"},
    {"role": "assistant", "content": "  Hello.  "},
    {"role": "user", "content": "Bye"},
]
# The devices that the supported families' templates are made of
TEMPLATES = {
    "trimmed blocks": (
        "{% for m in messages %}\n    "
        "{% if m.role == 'user' %}\nU: {{ m['content'] | trim }}\n    {% endif %}\n{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 0 %}{% continue %}"
        "{% endif %}{{ m.role }};{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages[1] | tojson }}{{ messages | tojson(indent=2) }}"
        "{{ {'b': 1, 'a': [none, true]} | tojson(sort_keys=true) }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
    "specials": (
        "{{ bos_token }}[INST] {{ messages[-1].content }} [/INST]"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    ),
    "defaults": (
        "{% if tools is none %}no tools{% endif %}"
        "{% if documents is defined %}|docs{% endif %}{{ missing|default('-') }}"
    ),
    "strings": (
        "{{ messages[2].content.strip().upper() }}"
        "{{ messages[1].content.split(',')[0] }}{{ messages[-1]['content'][::-1] }}"
    ),
    "macros": (
        "{% macro show(m) -%}{{ m.role ~ ': ' ~ m.content }}{%- endmacro %}"
        "{% for m in messages %}{{ show(m) }}\n{% endfor %}"
    ),
    "selection": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
        "{{ messages[1:] | length }}"
    ),
    "clock": "{{ strftime_now('%Y') | length }}",
    "switch": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_is_transformers_own(name: str) -> None:
    source, tokens = TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}
    extra: dict[str, Any] = {"enable_thinking": False} if name == "switch" else {}
    known: dict[str, Any] = {**tokens, **extra}
    expected = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **known)[0][0]
    assert ChatTemplate(source, tokens).render(MESSAGES, **extra) == expected
    assert expected


def test_what_the_template_refuses_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('Only user and assistant roles are supported!') }}", {})
    with pytest.raises(TemplateError, match=r"^Only user and assistant roles are supported!$"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ messages[0]['content'] / 2 }}",
        "{{ messages.nothing.more }}",
        "{{ 1 // 0 }}",
        "{{ missing() }}",
        "{% for m in messages %}{{ m.content }}",
        "{{ 'x' | no_such_filter }}",
    ],
)
def test_a_broken_template_is_one_kind_of_error(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) | length }}",
        "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterable.append({}) }}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(MESSAGES)
    assert MESSAGES[0]["role"] == "system" and len(MESSAGES) == 4


def test_a_loop_says_where_it_is_and_a_rendering_leaves_nothing_behind() -> None:
    source = (
        "{% set kept = 'x' if kept is not defined else 'y' %}{{ kept }}"
        "{% for m in messages %}{{ loop.index }}{{ loop.revindex0 }}{{ loop.length }}{{ loop.cycle('a', 'b') }}"
        "{{ '!' if loop.first or loop.last }} {% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert [template.render(MESSAGES) for _ in range(2)] == ["x134a! 224b 314a 404b! "] * 2


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ messages | length }} compiled once"
    first = ChatTemplate(source, {}).render(MESSAGES)
    import jinja2

    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jinja2.Environment, "from_string", fail)
    assert ChatTemplate(source, {}).render(MESSAGES) == first == "4 compiled once"
