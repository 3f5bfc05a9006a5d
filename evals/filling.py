# ruff: noqa: E501 - a frame is one line, however long.
"""A short text whose data is wanted as JSON, by a schema that the request gives.

Texts and keys are composed, so that most pairs of them are never seen twice; some ways to say
things are held out. Knows nothing of HTTP.
"""

import json
from typing import Any

from evals.wordings import Source, lines
from evals.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    COUNTED,
    FOODS,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
    WEEKDAYS,
    Turn,
    join_list,
    random_letters,
    with_articles,
)

# What a field may be called in a schema, and what its values are.
_FIELDS = {
    "name": ("name name name full_name person who", "name"),
    "age": ("age age age years age_in_years years_old", "age"),
    "city": ("city city city town location home lives_in home_town", "city"),
    "job": ("job job profession occupation work role position", "job"),
    "animal": ("animal animal pet species kind", "animal"),
    "pet_name": ("pet_name name called animal_name", "name"),
    "food": ("food food favourite_food dish likes meal", "food"),
    "customer": ("customer customer buyer client ordered_by name", "name"),
    "item": ("item item product article thing product_name", "thing"),
    "items": ("items products things goods bought list", "things"),
    "quantity": ("quantity quantity count amount number how_many units", "small"),
    "counted": ("item product article goods thing", "counted"),
    "price": ("price price cost price_in_dollars total", "price"),
    "colour": ("colour color colour shade", "colour"),
    "day": ("day day weekday date when", "day"),
    "place": ("place place venue location where", "place"),
    "event": ("event event occasion what event_name", "event"),
    "hour": ("hour hour time start starts_at start_hour", "hour"),
    "title": ("title title book book_title name", "title"),
    "author": ("author author writer written_by", "full"),
    "year": ("year year published publication_year", "year"),
    "pages": ("pages pages page_count length num_pages", "pages"),
    "owner": ("owner owner belongs_to owned_by person", "name"),
    "sender": ("sender sender from_person written_by", "name"),
    "receiver": ("receiver recipient receiver to_person", "name"),
    "paid": ("paid paid is_paid was_paid", "yes"),
    "friends": ("friends guests people names members", "names"),
    "scores": ("scores scores points numbers results", "numbers"),
    "winner": ("winner winner champion won_by", "name"),
}
_TYPES = {
    "age": "integer",
    "small": "integer",
    "price": "integer",
    "hour": "integer",
    "year": "integer",
    "pages": "integer",
    "yes": "boolean",
}
_DESCRIBED = {
    "name": "[The name|Name] [of the person|as in the text|].",
    "age": "[Age in years|How old|The age].",
    "city": "[The city|Name of the city|Which city].",
    "price": "[The price|What it costs|Price in dollars].",
    "day": "[The day of the week|Weekday|Which day].",
    "small": "[How many|The number].",
    "year": "[The year|Year of publication].",
    "colour": "[The colour|Its colour].",
    "job": "[The profession|What the person does].",
    "thing": "[The thing|What it is|Name of the product].",
}
# Texts: what stands in braces are fields.
_TEXTS = lines("""
    {name} is {age} years old and lives in {city}.
    {name} is {age} and [comes from|is from|lives in|was born in] {city}.
    {name} ({age}) [works as|is] a {job}.
    {name} ({age}) lives in {city} and [works as|is] a {job}.
    {name}, {age}, [is a|works as a] {job} [in|from] {city}.
    {name}, a {age}-year-old {job} from {city}, [is here|called today|wrote to us].
    {name} is a {age} year old {job} from {city}.
    I am {name}, I am {age} years old and I live in {city}.
    My name is {name}. I am {age} [years old |]and I [work as a|am a] {job}.
    Hi, I'm {name} from {city}. I am a {job} and {age} years old.
    [Our|The|My] {job} [is called|is|is named] {name}. [He|She] is {age}.
    {name} [works as a|is a] {job} in {city}. [He|She] is {age}[ years old|].
    {name} lives in {city}. [He|She] is {age} [years old |]and [likes|loves|eats] {food}.
    {name} from {city} [likes|loves|wants|orders] {food}.
    [Meet|This is|Here is] {name}, who is {age} and lives in {city}.
    The {job} {name} [has moved|moved] to {city} at the age of {age}.
    At {age}, {name} became a {job} in {city}.
    name: {name}, age: {age}, city: {city}
    Name: {name}\\nAge: {age}\\nJob: {job}
    {name} | {age} | {city} | {job}
    {name}; {age}; {job}
    {name} has a {animal} [called|named] {pet_name}.
    {name}, {age}, has a {animal} whose name is {pet_name}.
    {pet_name} is the {animal} of {name}.
    {pet_name} is {name}'s {animal}.
    The {animal} of {name} is {pet_name}.
    {name}'s {animal} is [called|named] {pet_name}.
    The name of {name}'s {animal} is {pet_name}.
    {name} has a {animal}. [It|The {animal}] is [called|named] {pet_name}.
    The {animal} [that {name} has|which {name} keeps] is [called|named] {pet_name}.
    The owner of {pet_name}, a {animal}, is {owner}.
    {name} calls the {animal} {pet_name}.
    {name}'s {animal} {pet_name} is {colour}.
    [This is|Look, here is] {pet_name}, the {animal} of {name}.
    The {animal} of {name} is {colour} and [called|named] {pet_name}.
    The friend of {name} is a {animal}, {pet_name}.
    The {item} of {owner} is {colour}.
    The {job} of {city} is {name}.
    The price of the {item} is {price} dollars and its colour is {colour}.
    The author of {title} is {author}.
    The winner of the {event} in {city} is {winner}.
    {pet_name}, the {animal}, [belongs to|lives with|is owned by] {owner}.
    {pet_name} is a {animal}. [Its owner is|It belongs to|It is the pet of] {name}.
    My {animal} {pet_name} is {colour} and {age} years old.
    The {animal} [is called|is named] {pet_name}. It is {colour} and belongs to {owner}.
    {owner} [owns|has] a {colour} {animal} [called|named] {pet_name}.
    {pet_name}, a {colour} {animal}, is {age} years old. [Its|The] owner is {owner}.
    {customer} [bought|ordered|got|purchased|wants] {quantity} {counted}.
    {customer} [bought|ordered|paid for] {quantity} {counted} for {price} dollars.
    {customer} from {city} [ordered|bought|wants] {quantity} {counted} [for|at] {price} [dollars|euros].
    [We|They] sold {quantity} {counted} to {customer} on {day}.
    [We|I] sent {quantity} {counted} to {customer} in {city}.
    Order: {quantity} {counted} for {customer}[, to {city}|].
    Please send {quantity} {counted} to {customer} in {city} [by|before|on] {day}.
    {quantity} {counted} were [ordered|bought] by {customer} on {day}.
    {customer} spent {price} [dollars|euros] on {quantity} {counted}.
    For {quantity} {counted}, {customer} paid {price} [dollars|euros].
    {quantity} {counted} cost {customer} {price} [dollars|euros].
    {customer} took {quantity} {counted} and paid {price} dollars.
    customer: {customer}, item: {counted}, quantity: {quantity}
    [The|A|One] {colour} {item} costs {price} [dollars|euros|pounds].
    The {item} is {colour} and costs {price} [dollars|euros].
    {customer} [bought|ordered|paid for] a {colour} {item} for {price} dollars.
    {customer} paid {price} [dollars|euros] for a {colour} {item} on {day}.
    A {colour} {item} was sold to {customer} for {price} [dollars|euros].
    For sale: {colour} {item}, {price} [dollars|euros], in {city}.
    {owner}'s {item} is {colour} and [is|lies|was left] in the {place}.
    The {colour} {item} in the {place} belongs to {owner}.
    {owner} lost a {colour} {item} [near|at|in] the {place} on {day}.
    Found: a {colour} {item} in the {place}. [The owner is|It belongs to] {owner}.
    The {event} is on {day} [at|in] the {place}.
    The {event} [starts|begins] at {hour} on {day}.
    The {event} [takes place|happens|will be] on {day} at {hour} o'clock in the {place}.
    [Join|Come to] the {event} [at|in] the {place} on {day}[ at {hour}|].
    On {day} there is a {event} in {city}[ at {hour} o'clock|].
    There will be a {event} in the {place} on {day}. [It|Entry] costs {price} [dollars|euros].
    {name} invites you to a {event} on {day} in the {place}.
    [Reminder|Note|Invitation]: {event}, {day}, {hour} o'clock, {place}.
    {event}: {day}, {hour} o'clock, {city}
    [When|Date]: {day}, {hour} o'clock. What: {event}. Where: {place}.
    {event} - {day} - {place} - {price} dollars
    {author} wrote {title} in {year}.
    {title} [by|was written by] {author}[ was published|] in {year}.
    The book {title} by {author} has {pages} pages.
    {title} has {pages} pages. [It was written by|Its author is] {author} in {year}.
    In {year}, {author} [published|wrote] {title}, [a book of|with] {pages} pages.
    title: {title}, author: {author}, year: {year}, pages: {pages}
    [I read|I am reading|We have] {title} by {author}. It has {pages} pages.
    {sender} [sent|wrote|gave] {receiver} a letter [on|last] {day}.
    {sender} [sent|gave|brought] {receiver} a {colour} {item}.
    {receiver} got a {item} from {sender} on {day}.
    {customer} [bought|ordered|needs|took] {items}.
    {customer} [bought|ordered] {items} and paid {price} [dollars|euros].
    [Shopping list of|List for|Basket of] {customer}: {items}.
    {name} [invited|met|called|knows] {friends}.
    {friends} came to {name}'s [party|house|dinner] on {day}.
    {friends} are [friends|guests] of {name}.
    {name} [scored|got|has] {scores} points [in the games|this week|in the rounds].
    {name}'s [scores|results|points] are {scores}.
    {winner} won the {event} in {city} [in|back in] {year}.
    The {event} of {year} was won by {winner}.
    {winner}, {age}, won the {event} on {day}.
    {customer} ordered a {item} for {price} [dollars|euros] and has {paid} paid.
    The bill of {customer} is {price} dollars and was {paid} paid.
    {customer} got a bill of {price} dollars, which is {paid} paid.
    The {item} for {customer} costs {price} dollars and was {paid} paid.
    The bill [for|of] the {item} is {paid} paid. [It|The bill] went to {customer}.
""")
_REQUESTS = lines("""
    {t}
    [Extract|Get|Pull out|Find|Read out] the [data|fields|details|information|facts] from [this|the text|this text|the following]: {t}
    [Turn|Convert|Make|Put] this into JSON: {t}
    [Fill in|Fill out] the [form|fields|record] [from|with|for] [this|this text|the text]: {t}
    {t} [Extract the data.|Give me JSON.|As JSON please.|Extract this.|Make JSON of this.|Answer in JSON.]
    [Please|Kindly|Now] [extract|read|parse] [this|the following|it]: {t}
    [Parse|Read|Analyse|Structure] [this|this text|the sentence|the following]: {t}
    [Text|Input|Note|Message]: {t}
    [What are the details|What does this say|What are the facts]? {t}
    "{t}"\\n[Extract the fields.|Return JSON.|Fill the schema.]
    [I need|I want|Give me] the [data|details|fields] of [this|this text]: {t}
    [Data|Details|JSON] please: {t}
    [Write down|Note|Save|Store|Record] [this|the data|these facts]: {t}
    {t}\\n\\n[Extract the information.|Fill in the fields.|Return the data.]
    [Answer with the fields|Use the schema] for: {t}
""")
_KEYS_ASKED = lines("""
    [Give me|Return|Write|Answer with|Reply with|Make] JSON with the keys {k}: {t}
    [Give me|Return|Make] a JSON object with {k}: {t}
    [Extract|Find|Get] {k} as JSON: {t}
    {t} [Give me|Return|Write] {k} as JSON.
    {t}\\n[Answer in JSON|Return JSON|JSON please], keys: {k}.
    As JSON ({k}): {t}
    [Extract|Return] the fields {k} [in|as] JSON from [this|this text]: {t}
    [Text|Input]: {t}\\nJSON keys: {k}
""")
_EVENTS = [
    "party",
    "game",
    "meeting",
    "concert",
    "race",
    "show",
    "lesson",
    "wedding",
    "fair",
    "film",
    "exam",
    "dinner",
    "festival",
]


def _name(source: Source) -> str:
    if source.chance(0.15):
        return random_letters(source, 3, 7).capitalize()
    return source.choice(NAMES)


def _value(source: Source, kind: str) -> Any:
    pools = {
        "city": CITIES,
        "job": JOBS,
        "animal": ANIMALS,
        "food": FOODS,
        "counted": COUNTED,
        "colour": COLOURS,
        "day": WEEKDAYS,
        "place": PLACES,
        "event": _EVENTS,
        "thing": THINGS,
    }
    if kind in pools:
        if kind in ("city", "thing", "counted", "place") and source.chance(0.1):
            word = random_letters(source, 4, 8)
            return word.capitalize() if kind == "city" else word
        return source.choice(pools[kind])
    if kind == "name":
        return _name(source)
    if kind == "full":
        return f"{_name(source)} {_name(source)}" if source.chance(0.7) else _name(source)
    if kind == "title":
        return " ".join(
            source.choice((*COLOURS, *THINGS, *PLACES, *ANIMALS)).capitalize()
            for _ in range(source.randint(1, 3))
        )
    if kind == "things":
        return source.sample((*THINGS, *FOODS), source.randint(2, 4))
    if kind == "names":
        return source.sample(NAMES, source.randint(2, 4))
    if kind == "numbers":
        return [source.randint(0, 99) for _ in range(source.randint(2, 4))]
    if kind == "yes":
        return source.chance(0.5)
    low, high = {
        "age": (1, 95),
        "small": (2, 60),
        "price": (2, 900),
        "hour": (1, 12),
        "year": (1850, 2025),
        "pages": (20, 900),
    }[kind]
    return source.randint(low, high)


def _written(source: Source, kind: str, value: Any) -> str:
    if isinstance(value, bool):
        return source.choice(("already", "")) if value else "not"
    if isinstance(value, list):
        parts = [str(each) for each in value]
        return ", ".join(parts[:-1]) + f" and {parts[-1]}"
    if kind == "title" and source.chance(0.5):
        mark = source.choice("\"'")
        return f"{mark}{value}{mark}"
    return str(value)


def _property(source: Source, kind: str, value: Any, described: bool) -> dict[str, Any]:
    if isinstance(value, list):
        inner = "integer" if kind == "numbers" else "string"
        found: dict[str, Any] = {"type": "array", "items": {"type": inner}}
    else:
        found = {"type": _TYPES.get(kind, "string")}
        if found["type"] == "integer" and source.chance(0.1):
            found["type"] = "number"
    if kind in ("colour", "day") and source.chance(0.2):
        pool = COLOURS if kind == "colour" else WEEKDAYS
        others = [each for each in pool if each != value]
        found["enum"] = sorted([value, *source.sample(others, source.randint(2, 5))])
    if described and kind in _DESCRIBED:
        found["description"] = source.spelled(_DESCRIBED[kind]).replace(" .", ".")
    return found


_VAGUE = {"date", "when", "location", "total", "years", "home"}
"""Keys that more than one kind of value might answer."""


def _key(source: Source, field: str, used: dict[str, str], fields: list[str]) -> str:
    names = _FIELDS[field][0].split()
    if field not in fields:  # Nothing in the text may seem to be meant.
        meant = {name for each in fields for name in _FIELDS[each][0].split()}
        names = [name for name in names if name not in _VAGUE | meant]
    if field in ("pet_name", "title") and {"name", "owner", "author"} & set(fields):
        names = [name for name in names if name != "name"]  # It would be anybody's.
    while True:
        key = source.choice(names)
        if source.chance(0.08):
            first, *rest = key.split("_")
            key = first + "".join(word.capitalize() for word in rest)
        elif source.chance(0.04):
            key = key.capitalize()
        if key not in used:
            return key
        names = [*names, field, f"{field}_2"]


def filling(source: Source) -> Turn:
    """Return a text, with a schema beside it or keys within the request, and the object wanted."""
    text = source.frame(_TEXTS).replace("\\n", "\n")
    fields = [field for field in _FIELDS if f"{{{field}}}" in text]
    values = {field: _value(source, _FIELDS[field][1]) for field in fields}
    written = {field: _written(source, _FIELDS[field][1], value) for field, value in values.items()}
    text = with_articles(text.format(**written).replace("  ", " "))
    wanted = [field for field in fields if source.chance(0.85)] or fields[:1]
    source.shuffle(wanted)
    keys: dict[str, str] = {}
    for field in wanted:
        keys[_key(source, field, keys, fields)] = field
    described = source.chance(0.3)
    properties = {
        key: _property(source, _FIELDS[field][1], values[field], described)
        for key, field in keys.items()
    }
    answer: dict[str, Any] = {key: values[field] for key, field in keys.items()}
    missing = [
        field for field in ("age", "city", "price", "day", "colour", "year") if field not in fields
    ]
    if source.chance(0.12):
        field = source.choice(missing)
        key = _key(source, field, keys, fields)
        kind = _FIELDS[field][1]
        properties[key] = {"type": [_TYPES.get(kind, "string"), "null"]}
        answer[key] = None
    reasoning = "\n".join(f"{key}: {_told(value)}" for key, value in answer.items())
    schema: dict[str, Any] | None = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    key_of_turn = f"fill {text} {list(answer)}"
    if None not in answer.values() and source.chance(0.2):
        said = source.frame(_KEYS_ASKED)
        listed = join_list(source, list(answer)) if source.chance(0.4) else ", ".join(answer)
        request = said.replace("\\n", "\n").format(k=listed, t=text)
        schema = {"type": "object"} if source.chance(0.4) else None
    else:
        request = source.frame(_REQUESTS).replace("\\n", "\n").format(t=text)
    written_answer = json.dumps(answer, ensure_ascii=False)
    return Turn(request, reasoning, written_answer, key_of_turn, "schema", schema=schema)


def _told(value: Any) -> str:
    if value is None:
        return "not said"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
