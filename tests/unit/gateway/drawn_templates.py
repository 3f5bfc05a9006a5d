"""Random chat templates from a seed, with the functions and variables that transformers offers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from .model_folder import ASSISTANT, BOS, EOS, USER

WORDS = [
    *("hello", "World", " day ", "\n", "é", "🙂", "<b>", "a<c", "12", "'s", '"', "&", "\\n", "{x}"),
    *("<", "ß", "你好", "  two  spaces ", "\ttab", "/", "%41", "<think"),
]
_TEXT = "m['content']"
SHOWN = [
    _TEXT,
    f"{_TEXT} | trim",
    f"{_TEXT} | upper | lower",
    f"{_TEXT} | title",
    f"{_TEXT} | capitalize",
    f"{_TEXT} | length",
    f"{_TEXT} | reverse | list | join('-')",
    f"{_TEXT} | replace('a', '<x>')",
    f"{_TEXT} | truncate(6, true)",
    f"{_TEXT} | wordcount",
    f"{_TEXT} | center(30)",
    f"{_TEXT} | indent(4, first=true)",
    f"{_TEXT} | wordwrap(5)",
    f"{_TEXT} | urlencode",
    f"{_TEXT} | e",
    f"{_TEXT} | tojson",
    f"{_TEXT} | tojson(ensure_ascii=True)",
    "m | tojson(indent=2)",
    "m | tojson(separators=(',', ':'), sort_keys=true)",
    "messages | tojson(ensure_ascii=true, indent=1)",
    "m",
    "m | dictsort",
    "m.items() | list",
    f"{_TEXT}[:3]",
    f"{_TEXT}[-4:]",
    f"{_TEXT}.split()[0] if {_TEXT}.split() else 'none'",
    f"{_TEXT}.startswith('h')",
    f"'<b>' in {_TEXT}",
    f"{_TEXT}.strip().split('<')[-1]",
    f"{_TEXT} | first",
    f"{_TEXT} | string | striptags",
    f"{_TEXT} is string",
    "m.nothing is defined",
    "m.content is none",
    "loop.index0 is even",
    "loop.index is divisibleby 2",
    "loop.cycle('x', 'y')",
    "loop.previtem is defined",
    "(loop.nextitem | default({'role': 'end'})).role",
    "messages | map(attribute='role') | unique | join(',')",
    "messages | selectattr('role', 'equalto', 'user') | list | length",
    "messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | list",
    "messages | groupby('role') | map('first') | list",
    "(messages | sort(attribute='content') | first).content",
    "[3, 1, 2] | sort | batch(2, 0) | list",
    "range(3) | list | sum",
    "strftime_now('%Y')",
    "dict(a=1, b=m.role)",
    "dict.fromkeys(['a', 'b'])",
    "pad_token is defined",
    "pad_token",
    "unk_token is defined",
    "image_token",
    "bos_token",
    "tools is none",
    "tools is defined",
    "documents is defined",
    "documents is none",
    "add_generation_prompt",
    "custom is defined",
    "custom",
    "thinking is defined",
    "namespace(a=1).a",
    "joiner(',')()",
    "'%s-%d' | format('a', 2)",
    "1.5 | round | int",
    "true | tojson",
    "none",
    "{'a': [1, 2.5, none, true], 'é': '<'} | tojson",
    "'a' ~ 1 ~ none",
    "m.role | default('x', true)",
    "['a', 'b'] | random in ['a', 'b']",
    "'\\n' | tojson",
    "lipsum(n=0)",
]
"""Template expressions for use inside the loop over messages."""
TAGS = [
    "{% if loop.last %}X{% continue %}{% endif %}",
    "{% if loop.index > 2 %}{% break %}{% endif %}",
    "{% generation %}{{ m['content'] }}{% endgeneration %}",
    "{%- generation -%} {{ m['content'] }} {%- endgeneration -%}",
    "{% generation %}{% set seen = 1 %}{% endgeneration %}{{ seen is defined }}",
    "{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}",
    "{% macro show(x) %}[{{ x }}]{% endmacro %}{{ show(m.role) }}",
    "{% call(x) wrap() %}{{ x }}{% endcall %}",
    "{% filter upper %}{{ m.role }}{% endfilter %}",
    "{% with a = m.role %}{{ a }}{% endwith %}",
    "{% raw %}{{ m }}{% endraw %}",
    "{# a comment #}\n  {% if true %}\n  a\n  {% endif %}\n",
    "{% if m.role == 'user' %}\n" + USER + "{% else %}\n" + ASSISTANT + "{% endif %}",
    "{% set ns = namespace(_a=1) %}",
    "{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('late') }}{% endif %}",
    "{% if m.reasoning_content is defined %}({{ m.reasoning_content | trim }}){% endif %}",
    "{% if m['reasoning_content'] and loop.index0 > 0 %}{{ m['reasoning_content'] }}{% endif %}",
    "{% if loop.last and m.reasoning_content is string %}{{ m.reasoning_content }}{% endif %}",
    "{% autoescape true %}{{ m.content }}{% endautoescape %}",
    "{% do [].append(1) %}",
    "{{ [].append(1) }}",
    "{{ m.update({'a': 1}) }}",
    "{{ ''.__class__ }}",
]
_WRAP = "{% macro wrap() %}<{{ caller('in') }}>{% endmacro %}"


def draw_template(rng: Random) -> str:
    """Draw the text of a template."""
    pieces = [f"{{{{ {each} }}}}" for each in rng.sample(SHOWN, rng.randrange(1, 5))]
    pieces += rng.sample(TAGS, rng.choice((0, 1, 1, 2)))
    rng.shuffle(pieces)
    body = rng.choice(("", "\n", " | ")).join(pieces)
    head = rng.choice(("", "{{ bos_token }}", BOS))
    head += rng.choice(("{{ tools }}", "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}"))
    tail = "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
    loop = "{%- for m in messages -%}" if rng.random() < 0.3 else "{% for m in messages %}"
    return f"{_WRAP}{head}{loop}{body}{rng.choice(('', EOS))}{{% endfor %}}{tail}"


def draw_messages(rng: Random) -> list[dict[str, str]]:
    """Draw one to four messages with random roles, in any order."""
    roles = [rng.choice(("system", "user", "assistant")) for _ in range(rng.randrange(1, 5))]
    return [{"role": role, "content": draw_words(rng)} for role in roles]


def draw_words(rng: Random) -> str:
    """Draw a text without control tokens."""
    return "".join(rng.choices(WORDS, k=rng.randrange(1, 8)))


def write_templates(rng: Random, folder: Path) -> None:
    """Write templates under one to three names where transformers looks for them: in
    tokenizer_config.json, and sometimes also in files of their own, which differ.
    """
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for each in ("chat_template.jinja", "chat_template.json"):
        (folder / each).unlink(missing_ok=True)
    more = folder / "additional_chat_templates"
    more.mkdir(exist_ok=True)
    for each in more.iterdir():
        each.unlink()
    names = rng.sample(("tool_use", "rag"), rng.randrange(3))
    named = [{"name": name, "template": draw_template(rng)} for name in ("default", *names)]
    config["chat_template"] = rng.choice((draw_template(rng), named))
    config["bos_token"] = BOS
    config["pad_token"] = rng.choice((None, EOS))
    config["image_token"] = rng.choice((None, USER))
    if rng.random() < 0.4:
        (folder / "chat_template.jinja").write_text(draw_template(rng), encoding="utf-8")
        for name in names:
            (more / f"{name}.jinja").write_text(draw_template(rng), encoding="utf-8")
    path.write_text(json.dumps(config), encoding="utf-8")
