"""Questions that need a tool: a calculator for numbers too large for the model, look-ups in a table,
conversion of units. The expected reply is one call, several calls at once, the next of several calls, or the
answer from the tools' results. Other questions need no tool, although tools are offered.

Tools have many names and descriptions, some of them held out. The sentences are in calling.yaml;
this module does not depend on them.
"""

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from evals.frames import Frames, Said, Words, load
from evals.numbers import SUMS, bare, operate, sum_asked
from evals.smalltalk import DECLINES, unknown_turn
from evals.wordings import Source, asked
from evals.words import (
    ALL_LOWER,
    CITIES,
    FOODS,
    NAMES,
    THINGS,
    Turn,
    random_letters,
    with_articles,
)

Fields = dict[str, Any]
Call = tuple[str, Fields]
Unit = tuple[str, ...]


class Tools(msgspec.Struct, frozen=True):
    """Contents of calling.yaml."""

    said: dict[str, Said]
    properties: dict[str, Words]
    keys: dict[str, Words]
    words: dict[str, Words]
    arguments: dict[str, Frames]
    units: dict[str, Frames]
    others: Frames
    errors: Frames


_TEXTS = load("calling", Tools)
_SAID, _WORDS, _OTHERS = _TEXTS.said, _TEXTS.words, _TEXTS.others
_UNITS = {
    quantity: tuple(tuple(unit.split()) for unit in units)
    for quantity, units in _TEXTS.units.items()
}
_IDLE = ("set_alarm", "set_timer", "open_door", "turn_on_light", "add_contact")
_NEVER_FITTING = tuple(each for each in _OTHERS if each.partition(":")[0] in _IDLE)
"""Tools that cannot answer any of the questions that the model must decline."""
NOTHING_FOUND = "Sorry, the tool found nothing."


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as a client offers it, with a function that writes its arguments."""

    name: str
    fields: Fields
    arguments: Callable[..., Fields]

    def call(self, *given: str) -> Call:
        return self.name, self.arguments(*given)


@dataclass(frozen=True, slots=True)
class Name:
    """Name of a tool; `tells` is True if the name describes what the tool does."""

    text: str
    tells: bool = True


def _tool(
    source: Source, name: Name, describe: Callable[[], str], parameters: dict[str, Fields]
) -> Fields:
    """Return a tool's definition for OpenAI's API. Some tools get no description."""
    function: Fields = {"name": name.text}
    if not name.tells or not source.chance(0.12):
        function["description"] = describe()
    if source.chance(0.45):
        for key, text in list(parameters.items()):
            parameters[key] = {k: v for k, v in text.items() if k != "description"}
    function["parameters"] = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters),
    }
    return {"type": "function", "function": function}


def _styled(source: Source, name: str) -> Name:
    """Return a tool's name in a random style: snake_case, camelCase or with hyphens. About one name in six is
    made of arbitrary words instead, so that the model has to copy names from the request.
    """
    tells = not source.chance(0.16)
    if not tells:
        name = "_".join(source.sample(ALL_LOWER, source.randint(1, 2)))
    style = source.random()
    parts = name.split("_")
    if len(parts) > 1 and style >= 0.8:
        camel = parts[0] + "".join(part.capitalize() for part in parts[1:])
        name = camel if style < 0.93 else "-".join(parts)
    return Name(name, tells)


def _argument(source: Source, key: str) -> str:
    """Return the name of a tool's only argument: `key`, or rarely an arbitrary word."""
    return source.choice(ALL_LOWER) if source.chance(0.12) else key


_WORDED = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _calculator(source: Source) -> Offer:
    said = _SAID["calculator"]
    name = _styled(source, source.frame(said["names"]))
    says = lambda: source.frame(said["says"])  # noqa: E731
    if source.chance(0.6):
        key = _argument(source, source.choice(_WORDS["expression"]))
        described = source.choice(said["argument"])
        fields = _tool(source, name, says, {key: {"type": "string", "description": described}})
        return Offer(name.text, fields, lambda a, op, b: {key: f"{a} {op} {b}"})
    first, second = source.choice(_TEXTS.arguments["numbers"]).split()
    key = source.choice(_WORDS["operation"])
    words = source.chance(0.6)
    values = list(_WORDED.values() if words else _WORDED)
    if source.chance(0.4):
        values += ["power"] if words else source.choice((["^"], ["^"], ["%"], ["%", "^"]))
    spec: dict[str, Fields] = {first: {"type": "number", "description": "The first number."}}
    operation: Fields = {"type": "string", "enum": values, "description": "What to do."}
    order = source.random()
    if order < 0.3:
        spec[key] = operation
    spec[second] = {"type": "number", "description": "The second number."}
    if order >= 0.3:
        spec[key] = operation
    if order > 0.7:
        spec = {key: spec.pop(key), **spec}
    fields = _tool(source, name, says, spec)

    def arguments(a: str, op: str, b: str) -> Fields:
        given = {first: json.loads(a), second: json.loads(b), key: _WORDED[op] if words else op}
        return {each: given[each] for each in spec}

    return Offer(name.text, fields, arguments)


@dataclass(frozen=True, slots=True)
class Looked(Offer):
    """A look-up tool: the kind of thing to look up (`entity`), the property that it returns (`shown`), and
    the kind of that property's values (`values`).
    """

    entity: str
    shown: str
    values: str


def _lookup(source: Source, numbers_only: bool = False) -> Looked:
    entity = source.choice(tuple(_TEXTS.properties))
    listed = [each.split(":") for each in _TEXTS.properties[entity]]
    fit = [each for each in listed if not numbers_only or each[1] == "number"]
    name, values = source.choice(fit)
    if source.chance(0.1):
        name = source.choice((random_letters(source, 4, 8), source.choice(ALL_LOWER)))
        values = "number"
    shown = name.replace("_", " ")
    key = source.choice(_TEXTS.keys[entity])
    described = source.choice(
        (f"The {entity}.", f"Name of the {entity}.", f"Which {entity}.", "What to look up.")
    )
    if source.chance(0.4 if entity == "country" else 0.12):
        table, row = source.choice(_TEXTS.arguments["table"]).split()
        called = _styled(source, source.choice(_WORDS["tables"]))
        others = sorted({n for n, _ in listed} - {name})
        values_of = source.sample([name, *source.sample(others, 2)], 3)
        spec: dict[str, Fields] = {
            table: {"type": "string", "enum": values_of, "description": "Which value."},
            row: {"type": "string", "description": described},
        }
        known = f"A {entity}'s {', '.join(values_of[:2])} or {values_of[2]}.".replace("_", " ")
        says = source.choice((f"Look up a value of a {entity} in a table.", known))
        fields = _tool(source, called, lambda: with_articles(says), spec)
        argued: Callable[[str], Fields] = lambda k: {table: name, row: k}  # noqa: E731
        return Looked(called.text, fields, argued, entity, shown, values)
    frame = source.frame(_SAID["table"]["names"])
    called = _styled(source, frame.format(v=source.choice(_WORDS["verbs"]), p=name, e=entity))
    of = key.replace("_", " ") if source.chance(0.5) else entity
    key = _argument(source, key)
    spec = {key: {"type": "string", "description": described}}

    def describe() -> str:
        text = source.frame(_SAID["table"]["says"]).format(q=shown, e=of)
        return with_articles(text[0].upper() + text[1:])

    fields = _tool(source, called, describe, spec)
    return Looked(called.text, fields, lambda k: {key: k}, entity, shown, values)


def _entities(source: Source, entity: str, count: int) -> list[str]:
    if source.chance(0.15):
        words = {random_letters(source, 4, 8) for _ in range(count * 3)}
        found = source.sample(sorted(words), count)
        return found if entity == "item" else [word.capitalize() for word in found]
    if entity == "item":
        return source.sample((*THINGS, *FOODS), count)
    if entity == "country":
        names = source.sample(_WORDS["country"], count)
        return [name.replace("_", " ") for name in names]
    return source.sample(CITIES if entity == "city" else NAMES, count)


def _value(source: Source, kind: str) -> str:
    if kind == "number":
        return str(source.randint(1, source.choice((30, 99, 999, 99999))))
    pools = {"name": NAMES, "city": CITIES, **_WORDS}
    return source.choice(
        pools[kind] if kind in ("name", "city", "weather", "colour") else ALL_LOWER
    )


def _returned(source: Source, key: str, value: str) -> str:
    """Return a result in one of the formats that tools use."""
    style = source.random()
    if style < 0.5:
        return value
    given = int(value) if value.isascii() and value.isdigit() else value
    name = "result" if style < 0.65 else ("value" if style < 0.75 else key.replace(" ", "_"))
    if style > 0.95:
        return json.dumps({"status": "ok", name: given})
    return json.dumps({name: given})


@dataclass(frozen=True, slots=True)
class Converter(Offer):
    """A tool that converts between the units in `units`. `arguments` takes units in the user's words."""

    units: dict[str, tuple[Unit, ...]]


def _units_listed(source: Source) -> tuple[dict[str, tuple[Unit, ...]], dict[str, str]]:
    """Return the units in a tool's schema, by quantity, and the user's word -> the tool's word."""
    column = source.choice((0, 0, 1, 2, 3))
    known = {
        quantity: tuple(unit for unit in units if unit[column] != "-")
        for quantity, units in _UNITS.items()
        if quantity != "money"  # The word "pounds" means a mass here.
    }
    if source.chance(0.6):
        kept = source.sample(sorted(known), source.randint(1, 3))
        known = {quantity: units for quantity, units in known.items() if quantity in kept}
    written = {
        word: unit[column] for units in known.values() for unit in units for word in unit[3:]
    }
    return known, written


def _converter(source: Source) -> Converter:
    name = _styled(source, source.frame(_SAID["converter"]["names"]))
    value, begin, end = source.choice(_TEXTS.arguments["conversion"]).split()
    spec: dict[str, Fields] = {
        value: {"type": "number", "description": "How much."},
        begin: {"type": "string", "description": "The unit it has."},
        end: {"type": "string", "description": "The unit wanted."},
    }
    if source.chance(0.2):
        spec = {begin: spec[begin], end: spec[end], value: spec[value]}
    known = _UNITS
    written: dict[str, str] = {}
    if source.chance(0.3):
        known, written = _units_listed(source)
        listed = list(dict.fromkeys(written.values()))
        for each in (begin, end):
            spec[each] = {"type": "string", "enum": listed, **spec[each]}
    fields = _tool(source, name, lambda: source.frame(_SAID["converter"]["says"]), spec)

    def arguments(a: str, u: str, v: str) -> Fields:
        given = {value: json.loads(a), begin: written.get(u, u), end: written.get(v, v)}
        return {each: given[each] for each in spec}

    return Converter(name.text, fields, arguments, known)


def _other(source: Source, others: tuple[str, ...] = _OTHERS) -> Fields:
    """Return a tool that no question here needs."""
    name, _, keys = source.choice(others).partition(":")
    spec: dict[str, Fields] = {
        key: {"type": "string", "description": f"The {key}."} for key in keys.split()
    }
    words = name.replace("_", " ")
    return _tool(source, _styled(source, name), lambda: f"{words[0].upper()}{words[1:]}.", spec)


def _mixed(
    source: Source,
    needed: list[Fields],
    others: tuple[Fields, ...] = (),
    more: tuple[str, ...] = _OTHERS,
) -> tuple[Fields, ...]:
    """Return the needed tools among a few unneeded ones, in random order. All names differ."""
    tools = {tool["function"]["name"]: tool for tool in needed}
    extra = list(others)
    for _ in range(source.choice((0, 0, 1, 1, 2))):
        extra.append(_other(source, more))
    for tool in extra:
        tools.setdefault(tool["function"]["name"], tool)
    found = list(tools.values())
    source.shuffle(found)
    return tuple(found)


def _keys(calls: Sequence[Call]) -> str:
    return "\n".join(f"tool {call}" for call in calls)


@dataclass(frozen=True, slots=True)
class Step:
    """Calls that a reply makes together, the reason for them, and their results."""

    why: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]

    def messages(self, number: int) -> list[Fields]:
        """Return the step as messages of the conversation."""
        return messages_of(self.calls, self.results, f"call_{number}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A question that needs tools, with all steps up to the answer."""

    question: str
    tools: tuple[Fields, ...]
    steps: tuple[Step, ...]
    reasoning: str
    answer: str

    @property
    def key(self) -> str:
        return _keys([call for step in self.steps for call in step.calls])


def _big(source: Source) -> tuple[str, str, str, str]:
    """Return (a, operator, b, result) with numbers too large for the model to compute."""
    op = source.choice("++--****/")
    if source.chance(0.12):
        a, b = (f"{source.randint(0, 999)}.{source.randint(1, 99)}".rstrip("0") for _ in range(2))
        a, b = (each + "5" * each.endswith(".") for each in (a, b))
        return a, op, b, str(round(_OPERATORS[op](float(a), float(b)), 4))
    if op == "/":
        y = source.randint(11, 999)
        x = y * source.randint(11, 9999)
        return str(x), op, str(y), str(x // y)
    if op == "*":
        x, y = source.randint(101, 99999), source.randint(13, 9999)
        x, y = (x, y) if source.chance(0.7) else (y, x)
        return str(x), op, str(y), str(x * y)
    sizes = source.randint(5, 9), source.randint(4, 9)
    x, y = (source.randint(10 ** (size - 1), 10**size - 1) for size in sizes)
    x, y = (max(x, y), min(x, y)) if op == "-" else (x, y)
    return str(x), op, str(y), str(_OPERATORS[op](x, y))


def _reckon(source: Source, offer: Offer) -> tuple[str, str, Call, str]:
    """Return a question for the calculator, the expression in it, its call, and the result."""
    a, op, b, value = _big(source)
    said = sum_asked(source, op, [frame for frame in bare(op) if "x =" not in frame])
    turned = op in "+*" and said.index("{b}") < said.index("{a}")
    x, y = (b, a) if turned else (a, b)  # x and y are in the question's order.
    return said.format(a=a, b=b), f"{x} {op} {y}", offer.call(x, op, y), value


def _found(value: str) -> str:
    return f"The result is {value}."


def _one_reckoned(source: Source) -> Plan:
    offer = _calculator(source)
    question, sum_, call, value = _reckon(source, offer)
    others = _others_of(source, "calculator")
    result = _returned(source, "result", value)
    step = Step(f"big: {sum_}: {offer.name}.", (call,), (result,))
    tools = _mixed(source, [offer.fields], others)
    return Plan(question, tools, (step,), _found(value), value)


_KIND_TO_MAKER: dict[str, Callable[[Source], Offer]] = {
    "calculator": _calculator,
    "lookup": _lookup,
    "converter": _converter,
}


def _others_of(source: Source, *but: str) -> tuple[Fields, ...]:
    """Return unneeded tools of the other kinds of _KIND_TO_MAKER, each with a chance of 0.3."""
    return tuple(
        maker(source).fields
        for kind, maker in _KIND_TO_MAKER.items()
        if kind not in but and source.chance(0.3)
    )


def _one_looked_up(source: Source) -> Plan:
    looked = _lookup(source)
    (k,) = _entities(source, looked.entity, 1)
    question = asked(source, **_SAID["look_up"]).format(q=looked.shown, k=k)
    tools = _mixed(source, [looked.fields], _others_of(source, "lookup"))
    why, calls = f"{looked.shown}: {looked.name} for {k}.", (looked.call(k),)
    if source.chance(0.06):
        step = Step(why, calls, (source.choice(_TEXTS.errors),))
        return Plan(question, tools, (step,), "The tool found nothing.", NOTHING_FOUND)
    value = _value(source, looked.values)
    step = Step(why, calls, (_returned(source, looked.shown, value),))
    return Plan(question, tools, (step,), _found(value), value)


def _units(source: Source, offer: Converter) -> tuple[str, str]:
    """Return two units of a quantity that the tool supports, in the user's words."""
    units = source.sample(source.choice(tuple(offer.units.values())), 2)
    first, second = (source.choice((unit[3], *unit[3:])) for unit in units)
    return first, second


def _which_units(u: str, v: str, call: Call) -> str:
    """Return the units in the user's words, and also in the tool's words if those differ."""
    begin, end = (each for each in call[1].values() if isinstance(each, str))
    return f"{u} to {v}" if (u, v) == (begin, end) else f"{u} to {v}, so {begin} to {end}"


def _one_converted(source: Source) -> Plan:
    offer = _converter(source)
    u, v = _units(source, offer)
    a = str(source.randint(2, source.choice((20, 99, 999, 9999))))
    if source.chance(0.12):
        a += f".{source.randint(1, 9)}"
    said = asked(source, **_SAID["convert"])
    call = offer.call(a, u, v)
    value = str(source.randint(1, 9999))
    if source.chance(0.4):
        value += f".{source.randint(1, 99)}"
    result = _returned_unit(source, value, v)
    step = Step(f"{_which_units(u, v, call)}: {offer.name}.", (call,), (result,))
    tools = _mixed(source, [offer.fields], _others_of(source, "converter"))
    return Plan(said.format(a=a, u=u, v=v), tools, (step,), _found(value), f"{value} {v}")


def _returned_unit(source: Source, value: str, unit: str) -> str:
    style = source.random()
    if style < 0.55:
        return value
    if style < 0.7:
        return f"{value} {unit}"
    name = source.choice(("result", "value", unit))
    return f'{{"{name}": {value}}}'


def _pair(source: Source) -> Plan:
    """Return a plan with two look-ups in one reply. The question asks for both values, which of them is
    larger, or their sum.
    """
    kind = source.choices(("pair", "more", "total"), (4, 4, 2))[0]
    looked = _lookup(source, numbers_only=kind != "pair")
    k, m = _entities(source, looked.entity, 2)
    question = asked(source, **_SAID[kind]).format(q=looked.shown, k=k, l=m)
    values = [_value(source, looked.values) for _ in range(2)]
    if kind == "more" and values[0] == values[1]:
        values[1] += "0"
    if kind == "total":
        values = [str(source.randint(1, 999)) for _ in range(2)]
    results = tuple(_returned(source, looked.shown, value) for value in values)
    why = f"{looked.shown}: {looked.name} for {k} and {m}."
    if kind == "pair":
        answer = f"{k}: {values[0]}, {m}: {values[1]}"
        reasoning = f"answer: {answer}"
    elif kind == "more":
        sign = ">" if int(values[0]) > int(values[1]) else "<"
        answer = k if sign == ">" else m
        reasoning = f"sort: {k} {values[0]} {sign} {m} {values[1]}"
    else:
        reasoning, answer = operate("+", *map(int, values))
        reasoning = f"sum: {reasoning}"
    tools = _mixed(source, [looked.fields], _others_of(source, "lookup")[1:])
    step = Step(why, (looked.call(k), looked.call(m)), results)
    return Plan(question, tools, (step,), reasoning, answer)


def _two_reckoned(source: Source) -> Plan:
    """Return a plan for a question with two calculations, or with two conversions."""
    calls, phrases, values, names, ways = [], [], [], [], []
    offer = _calculator(source) if source.chance(0.6) else _converter(source)
    for _ in range(2):
        if isinstance(offer, Converter):
            u, v = _units(source, offer)
            a = str(source.randint(2, 999))
            phrases.append(source.frame(_SAID["convert"]["nouns"][:1]).format(a=a, u=u, v=v))
            names.append(f"{a} {u}")
            calls.append(offer.call(a, u, v))
            ways.append(_which_units(u, v, calls[-1]))
            values.append(f"{source.randint(1, 999)} {v}")
        else:
            a, op, b, value = _big(source)
            phrases.append(source.frame(SUMS[op]["signs"]).format(a=a, b=b))
            names.append(f"{a} {op} {b}")
            calls.append(offer.call(a, op, b))
            values.append(value)
    what = "; ".join(ways) if ways else f"big: {'; '.join(names)}"
    why = f"{what}: {offer.name} for both."
    question = asked(source, **_SAID["both"]).format(p=phrases[0], q=phrases[1])
    results = tuple(value.split(" ")[0] for value in values)
    answer = f"{names[0]}: {values[0]}, {names[1]}: {values[1]}"
    step = Step(why, tuple(calls), results)
    return Plan(question, _mixed(source, [offer.fields]), (step,), f"answer: {answer}", answer)


def _chain(source: Source) -> Plan:
    """Return a plan of two steps: one or two look-ups, then a calculation with what they found."""
    looked = _lookup(source, numbers_only=True)
    offer = source.until(lambda: _calculator(source), lambda offer: offer.name != looked.name)
    value = str(source.randint(12, 9999))
    if source.chance(0.35):
        sought, op = _entities(source, looked.entity, 2), "+"
        values = [str(source.randint(1000, 99999)) for _ in range(2)]
        value, b = values
        question = asked(source, **_SAID["total"]).format(q=looked.shown, k=sought[0], l=sought[1])
    else:
        sought, op = _entities(source, looked.entity, 1), "*"
        values, b = [value], str(source.randint(12, 999))
        question = asked(source, **_SAID["times"]).format(q=looked.shown, k=sought[0], i=b)
    result = str(_OPERATORS[op](int(value), int(b)))
    first = Step(
        f"{looked.shown}: {looked.name} for {' and '.join(sought)}, then {offer.name}.",
        tuple(looked.call(each) for each in sought),
        tuple(_returned(source, looked.shown, each) for each in values),
    )
    why = f"{_found(value)} Now {value} {op} {b}: {offer.name}."
    second = Step(why, (offer.call(value, op, b),), (_returned(source, "result", result),))
    tools = _mixed(source, [looked.fields, offer.fields])
    return Plan(question, tools, (first, second), _found(result), result)


def messages_of(calls: Sequence[Call], results: Sequence[str], name: str) -> list[Fields]:
    """Return calls made at once, with their results, as messages of the conversation. `name`:
    prefix of the calls' ids.
    """
    made = [
        {
            "id": f"{name}_{index}",
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(arguments)},
        }
        for index, (called, arguments) in enumerate(calls)
    ]
    return [
        {"role": "assistant", "content": "", "tool_calls": made},
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(made, results, strict=True)
        ),
    ]


def whole(plan: Plan) -> list[Fields]:
    """Return a completed plan, including its answer, as an earlier turn."""
    messages: list[Fields] = [{"role": "user", "content": plan.question}]
    for number, step in enumerate(plan.steps):
        messages += step.messages(number)
    return [*messages, {"role": "assistant", "content": plan.answer}]


def a_plan(source: Source) -> Plan:
    maker = source.choices(
        (_one_reckoned, _one_looked_up, _one_converted, _pair, _two_reckoned, _chain),
        (5, 5, 4, 4, 2, 4),
    )[0]
    return maker(source)


def calling(source: Source) -> Turn:
    """Return a question that needs tools, at a random step on the way to its answer."""
    plan = a_plan(source)
    num_steps = len(plan.steps)
    # The first call gets the most examples, because it has the most ways to go wrong.
    done = source.choices(range(num_steps + 1), (5, *(3,) * num_steps))[0]
    if done == 0 and source.chance(0.12):
        return _once_more(source)
    before: list[Fields] = []
    for number, step in enumerate(plan.steps[:done]):
        before += step.messages(number)
    turn = Turn(plan.question, plan.reasoning, plan.answer, plan.key, "answer", tools=plan.tools)
    if done == num_steps:
        return replace(turn, before=tuple(before))
    step, forced = plan.steps[done], ""
    if len(step.calls) == 2 and source.chance(0.15):
        # A client may allow only one call per reply: then the second call follows the first call's
        # result.
        first, second = (
            replace(step, calls=step.calls[i : i + 1], results=step.results[i : i + 1])
            for i in range(2)
        )
        before += first.messages(done)
        step = replace(second, why=f"Next: {second.calls[0][0]}.")
    if done == 0 and len(step.calls) == 1 and source.chance(0.08):
        forced = "any" if source.chance(0.5) else step.calls[0][0]
    return replace(
        turn,
        reasoning=step.why,
        answer="",
        kind="calls",
        calls=step.calls,
        before=tuple(before),
        forced=forced,
    )


def _once_more(source: Source) -> Turn:
    """Return a turn that needs a look-up, after an earlier look-up with the same tool."""
    looked, looking = _lookup(source), _SAID["look_up"]
    k, m = _entities(source, looked.entity, 2)
    said = asked(source, nouns=looking["nouns"], questions=looking["questions"])
    value = _value(source, looked.values)
    step = Step("", (looked.call(k),), (_returned(source, looked.shown, value),))
    again = asked(source, **_SAID["again"]).format(k=m, q=looked.shown)
    before = [
        *step.messages(0),
        {"role": "assistant", "content": value},
        {"role": "user", "content": again},
    ]
    return Turn(
        said.format(q=looked.shown, k=k),
        f"{looked.shown}: {looked.name} for {m}.",
        "",
        _keys([looked.call(k), looked.call(m)]),
        "calls",
        tools=_mixed(source, [looked.fields], _others_of(source, "lookup")),
        calls=(looked.call(m),),
        before=tuple(before),
    )


def needless(source: Source, turn: Turn) -> Turn:
    """Return `turn` with tools that it does not need; or a question that the model declines, with tools that
    cannot answer it either.
    """
    if turn.answer in DECLINES or source.chance(0.12):
        if turn.answer not in DECLINES:
            turn = unknown_turn(source)
        tools = [_other(source, _NEVER_FITTING)]
        if not any(char.isdigit() for char in turn.question):
            tools.append(_calculator(source).fields)
        return replace(turn, tools=_mixed(source, tools, more=_NEVER_FITTING))
    makers = (*_KIND_TO_MAKER.values(), None)
    some = source.some(makers, 1, 3)
    tools = [maker(source).fields if maker else _other(source) for maker in some]
    return replace(turn, tools=_mixed(source, tools))
