"""Reading tasks: questions about a short text (person, place, thing, time, number).

A text is a few facts about different people, places and things, so every question has one answer,
or none in the text. The reasoning states what is asked and copies the text up to the sentence with
the answer. The sentences are in texts.yaml.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import Formatter

import msgspec

from evals.frames import Frames, Words, load
from evals.numbers import say
from evals.wordings import Source, asked
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
    jumble,
    random_letters,
)

NOT_SAID = "The text does not say."


class Wording(msgspec.Struct, frozen=True):
    """Questions and noun phrases that ask for one answer."""

    questions: Frames
    nouns: Frames = Frames("")
    kind: str = ""
    """Subject of the question in one word, if it differs from the fact's."""
    role: str = ""
    """Requested part of the fact, such as "from"; empty: the first word of the first question."""


class Known(msgspec.Struct, frozen=True):
    """Sentences that state a fact, and the questions for its answers."""

    asks: dict[str, Wording]
    told: Frames = Frames("")
    kind: str = "place"
    """Subject of the fact in one word."""


class Texts(msgspec.Struct, frozen=True):
    """Contents of texts.yaml."""

    layouts: Frames
    no_facts: Frames
    days: list[str]
    facts: dict[str, Known]
    words: dict[str, Words]


_TEXTS = load("texts", Texts)
_FACTS, _WORDS = _TEXTS.facts, _TEXTS.words


@dataclass(frozen=True, slots=True)
class Asks:
    """An answer, and the wordings that ask for it."""

    answer: str
    wording: Wording

    def about(self, fact: "Fact") -> tuple[str, str]:
        first = re.match(r"\W*(\w+)", self.wording.questions[0])
        assert first is not None
        return self.wording.kind or fact.kind, self.wording.role or first[1].lower()


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, and the answers in it. `slots` fill the questions' braces; `subject` is the subject of
    the sentence, which the next sentence may replace by a pronoun if it is a person.
    """

    sentence: str
    slots: dict[str, str]
    asks: tuple[Asks, ...]
    subject: str = ""
    read: str = ""
    """Reasoning that turns a number in words into digits."""
    who: str = ""
    """Reasoning that resolves the sentence's pronoun to a name."""
    kind: str = ""
    """Subject of the fact in one word."""

    def tells(self, given: str) -> bool:
        """Return True if this fact contains `given`, a value from a question."""
        return given in {_bare(value) for value in self.slots.values()}


class Pool:
    """Names and words for one text, each drawn at most once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.used: set[str] = set()

    def draw(self, words: Sequence[str]) -> str:
        while True:
            word = self.source.choice(words)
            if self.source.chance(0.06):
                word = random_letters(self.source, 3, 7)
                word = word.capitalize() if words in (NAMES, CITIES) else word
            if word not in self.used:
                self.used.add(word)
                return word

    def number(self, low: int, high: int) -> str:
        while True:
            value = str(self.source.randint(low, high))
            if value not in self.used:
                self.used.add(value)
                return value


def _bare(words: str) -> str:
    return re.sub(r"^(the|an?) ", "", words)


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _act(pool: Pool) -> Fact:
    """Return a fact: a person did something to a thing, perhaps at a place or on a day."""
    source = pool.source
    n, known = pool.draw(NAMES), _FACTS["act"]
    wordings = known.asks
    v, b, pp = source.choice(_WORDS["verbs"]).split("/")
    if source.chance(0.08):
        root = random_letters(source, 3, 6)
        v, b, pp = f"{root}ed", root, f"{root}ed"
    slots, read = {"n": n, "v": v, "b": b, "pp": pp}, ""
    many = source.chance(0.3)
    if many:
        k, t = pool.number(2, 40), pool.draw(COUNTED)
        word, read = _in_words(source, k)
        said = obj = f"{word} {t}"
        slots |= {"o": f"the {t}", "t": t}
        asks = [Asks(k, wordings["count"]), Asks(obj, wordings["what"])]
    else:
        t, colour = pool.draw(THINGS), source.choice(COLOURS) if source.chance(0.35) else ""
        full = f"{colour} {t}".strip()
        obj = said = _a(full) if source.chance(0.5) else f"the {full}"
        slots |= {"o": f"the {t}", "t": t}
        asks = [Asks(obj, wordings["what"])]
        if colour:
            asks.append(Asks(colour, wordings["colour"]))
    asks.append(Asks(n, wordings["who"]))
    if source.chance(0.4):
        prep, p = source.choice(("in", "at", "near", "behind", "in")), pool.draw(PLACES)
        said += f" {prep} the {p}"
        asks.append(Asks(_where(prep, p), wordings["where"]))
    early = ""
    if source.chance(0.25):
        day = source.choice(WEEKDAYS)
        when = source.choice(_TEXTS.days).format(d=day)
        asks.append(Asks(when.removeprefix("on "), wordings["when"]))
        if source.chance(0.4):
            early = when[0].upper() + when[1:] + ("," if source.chance(0.6) else "") + " "
        else:
            said += f" {when}"
    if not early and said == obj and not many and source.chance(0.2):
        sentence, read = f"{obj[0].upper()}{obj[1:]} was {pp} by {n}.", ""
    else:
        sentence = f"{early}{n} {v} {said}."
    return Fact(sentence, slots, tuple(asks), n, read, kind=known.kind)


def _in_words(source: Source, value: str) -> tuple[str, str]:
    """Return a number as the text has it, and the reasoning that gives its digits."""
    if not source.chance(0.25):
        return value, ""
    word = say(source, int(value))
    return word, f"\n{word} = {value}"


def _told(pool: Pool, name: str, slots: dict[str, str], subject: str = "", **answers: str) -> Fact:
    """Return a fact of texts.yaml with its answers."""
    known = _FACTS[name]
    sentence = pool.source.frame(known.told).format(**slots)
    asks = tuple(Asks(answers[key], wording) for key, wording in known.asks.items())
    return Fact(sentence, slots, asks, subject, kind=known.kind)


def _where(prep: str, place: str) -> str:
    return f"the {place}" if prep in ("in", "at") else f"{prep} the {place}"


def _go(pool: Pool) -> Fact:
    n, p = pool.draw(NAMES), pool.draw(PLACES)
    return _told(pool, "go", {"n": n, "p": p}, n, place=f"the {p}", person=n)


def _at(pool: Pool) -> Fact:
    n, p = pool.draw(NAMES), pool.draw(PLACES)
    prep = pool.source.choice(("in", "at", "in", "near", "behind", "outside"))
    return _told(pool, "at", {"n": n, "p": p, "r": prep}, n, place=_where(prep, p), person=n)


def _has(pool: Pool) -> Fact:
    n, t, c = pool.draw(NAMES), pool.draw(THINGS), pool.source.choice(COLOURS)
    slots = {"n": n, "t": t, "x": _a(f"{c} {t}"), "at": _a(t), "v": "had", "c": c}
    return _told(pool, "has", slots, n, owner=n, colour=c)


def _count(pool: Pool) -> Fact:
    n, t, k = pool.draw(NAMES), pool.draw(COUNTED), pool.number(2, 60)
    word, read = _in_words(pool.source, k)
    fact = _told(pool, "count", {"n": n, "t": t, "k": word}, n, number=k, owner=n)
    return replace(fact, read=read)


def _gave(pool: Pool) -> Fact:
    n, m, t = pool.draw(NAMES), pool.draw(NAMES), pool.draw(THINGS)
    slots = {"n": n, "m": m, "t": t}
    return _told(pool, "gave", slots, giver=n, thing=f"the {t}", taker=m)


def _age(pool: Pool) -> Fact:
    n, k = pool.draw(NAMES), pool.number(2, 90)
    return _told(pool, "age", {"n": n, "k": k}, n, age=k, person=n)


def _pet(pool: Pool) -> Fact:
    n, a, m = pool.draw(NAMES), pool.draw(ANIMALS), pool.draw(NAMES)
    slots = {"n": n, "a": a, "m": m, "x": _a(a)}
    return _told(pool, "pet", slots, n, called=m, owner=n, animal=_a(a))


def _thing_at(pool: Pool) -> Fact:
    t, p = pool.draw(THINGS), pool.draw(PLACES)
    prep = pool.source.choice(("in", "in", "at", "behind", "near", "under", "on"))
    if prep in ("under", "on"):
        p = pool.source.choice(_WORDS["surfaces"])
        if p in pool.used:
            p = pool.draw(PLACES)
        pool.used.add(p)
    slots = {"t": t, "p": p, "r": prep, "x": _a(t)}
    return _told(pool, "thing_at", slots, place=_where(prep, p), thing=f"the {t}")


def _likes(pool: Pool) -> Fact:
    n, f = pool.draw(NAMES), pool.draw(FOODS)
    return _told(pool, "likes", {"n": n, "f": f}, n, food=f, person=n)


def _job(pool: Pool) -> Fact:
    n, j = pool.draw(NAMES), pool.draw(JOBS)
    return _told(pool, "job", {"n": n, "j": j, "x": _a(j)}, n, job=_a(j), person=n)


def _city(pool: Pool) -> Fact:
    n, c = pool.draw(NAMES), pool.draw(CITIES)
    return _told(pool, "city", {"n": n, "c": c}, n, city=c, person=n)


def _relative(pool: Pool) -> Fact:
    n, m = pool.draw(NAMES), pool.draw(NAMES)
    r = pool.source.choice(_WORDS["relatives"])
    return _told(pool, "relative", {"n": n, "m": m, "r": r, "x": _a(r)}, person=n, other=m)


def _price(pool: Pool) -> Fact:
    t, k = pool.draw(THINGS), pool.number(2, 99)
    return _told(pool, "price", {"t": t, "k": k}, price=k, thing=f"the {t}")


def _event(pool: Pool) -> Fact:
    e = pool.draw(_WORDS["events"])
    d, k = pool.source.choice(WEEKDAYS), pool.number(1, 12)
    slots = {"e": e, "d": d, "k": k}
    if pool.source.chance(0.4):
        return _told(pool, "event_hour", slots, hour=k, event=f"the {e}")
    return _told(pool, "event_day", slots, day=d)


def _compared(pool: Pool) -> Fact:
    n, m = pool.draw(NAMES), pool.draw(NAMES)
    more, less = pool.source.choice(_WORDS["sizes"]).split("/")
    if pool.source.chance(0.4):
        more, less = less, more
    return _told(pool, "compared", {"n": n, "m": m, "g": more, "l": less}, more=n, less=m)


_MAKERS = (
    *(_act,) * 7,
    *(_go,) * 2,
    *(_at,) * 2,
    _has,
    _count,
    *(_gave,) * 2,
    _age,
    _pet,
    *(_thing_at,) * 2,
    _likes,
    _job,
    _city,
    _relative,
    _price,
    _event,
    _compared,
)
_VERB_SLOTS = {"v", "b", "pp"}


def make_text(source: Source, num_facts: int) -> tuple[Pool, list[Fact], str]:
    """Return (pool of unused names, facts, their text) for a text of `num_facts` facts."""
    pool = Pool(source)
    facts: list[Fact] = []
    last = None
    while len(facts) < num_facts:
        maker = source.choice(_MAKERS)
        fact = maker(pool)
        # No text gives one person two ages or two places.
        differ = maker is not last and not {maker, last} <= {_go, _at, _city}
        if facts and facts[-1].subject in NAMES and fact.subject and source.chance(0.2) and differ:
            fact = _same_person(fact, facts[-1].subject, source) or fact
        facts.append(fact)
        last = maker
    if source.chance(0.12):
        place = source.randint(0, len(facts))
        facts.insert(place, Fact(source.frame(_TEXTS.no_facts), {}, ()))
    if source.chance(0.12):
        said = jumble(source, source.randint(3, 8))
        place = source.randint(0, len(facts))
        facts.insert(place, Fact(f"{said[0].upper()}{said[1:]}.", {}, ()))
    if num_facts > 1 and source.chance(0.22):
        facts = _joined(source, facts, source.randrange(len(facts) - 1))
    return pool, facts, " ".join(_read(facts))


def _read(facts: Sequence[Fact]) -> dict[str, str]:
    """Return sentence -> the sentence with notes that resolve its pronouns. A sentence with two facts has one
    entry.
    """
    found: dict[str, str] = {}
    for fact in facts:
        found[fact.sentence] = found.get(fact.sentence, fact.sentence) + fact.who
    return found


def _joined(source: Source, facts: list[Fact], first: int) -> list[Fact]:
    """Return the facts with two neighbours joined into one sentence."""
    one, two = facts[first], facts[first + 1]
    word = two.sentence.split(" ", 1)[0]
    rest = two.sentence
    if word.rstrip(",") in _WORDS["firsts"]:
        rest = rest[0].lower() + rest[1:]
    glue = source.choice((", and ", " and ", ", but ", " while ", "; ", ", "))
    sentence = f"{one.sentence[:-1]}{glue}{rest}"
    both = [replace(fact, sentence=sentence) for fact in (one, two)]
    return [*facts[:first], *both, *facts[first + 2 :]]


def _same_person(fact: Fact, name: str, source: Source) -> Fact | None:
    """Return the fact as one about `name`, the subject of the sentence before, with a pronoun; None
    if the sentence does not start with its subject.
    """
    if not fact.sentence.startswith(f"{fact.subject} "):
        return None
    who = "She" if name in _WORDS["she"] else "He"
    rest = fact.sentence[len(fact.subject) :]
    asks = tuple(
        replace(ask, answer=name if ask.answer == fact.subject else ask.answer) for ask in fact.asks
    )
    start = f"Then {who.lower()}" if source.chance(0.15) else who
    slots = {**fact.slots, "n": name}
    who_is = f" {who} is {name}."
    return replace(
        fact, sentence=f"{start}{rest}", slots=slots, asks=asks, subject=name, who=who_is
    )


@dataclass(frozen=True, slots=True)
class Sought:
    """Short form of a question: its kind, the requested part, and the given values."""

    kind: str
    role: str
    given: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([f"{self.kind} {self.role}", *self.given])

    def looked_for(self, facts: Sequence[Fact]) -> tuple[str, bool]:
        """Return how well the facts of one sentence match, as text, and whether one matches fully.
        The text has their kind, then the given values up to the first one that no fact contains.
        """
        kinds = {ask.about(fact)[0] for fact in facts for ask in fact.asks}
        if not kinds:
            return "no", False
        if self.kind not in kinds:
            return f"{facts[0].kind} no", False
        fit = [f for f in facts if any(a.about(f) == (self.kind, self.role) for a in f.asks)]
        if not fit:
            return f"{self.kind} no", False
        return max(map(self._compared, fit), key=lambda found: found[0].count(" yes"))

    def _compared(self, fact: Fact) -> tuple[str, bool]:
        looked = [f"{self.kind} {self.role}"]
        for each in self.given:
            if not fact.tells(each):
                return ", ".join([*looked, f"{each} no"]), False
            # The text may have the reverse comparison.
            turned = f" as {fact.slots['g']}" if each == fact.slots.get("l") else ""
            looked.append(f"{each}{turned} yes")
        return ", ".join(looked), True


def ask(pool: Pool, facts: list[Fact]) -> tuple[str, str, str]:
    """Return (question, reasoning, answer) about a text. The reasoning begins with the short form
    of the question. Then it copies one sentence per line, after a dash and a space, with how well
    it matches, until one matches fully.
    """
    source, told = pool.source, _read(facts)
    read: list[tuple[str, bool]] = []
    question, sought = "", Sought("", "", ())

    def look(fact: Fact, wanted: Asks) -> None:
        nonlocal question, sought
        question, sought = _worded(source, fact, wanted)
        read.clear()
        for sentence, text in told.items():
            found, is_told = sought.looked_for([f for f in facts if f.sentence == sentence])
            read.append((f"- {text} {found}", is_told))

    def shown(num: int) -> str:
        return "\n".join([f"read: {sought}", *(line for line, _ in read[:num])])

    if source.chance(0.07):

        def other() -> bool:
            with source.aside():  # The text does not have this fact, so its frame must not count.
                fact = source.choice(_MAKERS[:-1])(pool)
            look(fact, source.choice(fact.asks))
            return not any(is_told for _, is_told in read)

        source.until(other, bool)
        return question, f"{shown(len(read))}\nThat is not in the text.", NOT_SAID

    def one() -> tuple[Fact, Asks, int]:
        fact = source.choice([fact for fact in facts if fact.asks])
        wanted = source.choice(fact.asks)
        look(fact, wanted)
        return fact, wanted, [is_told for _, is_told in read].index(True)

    # The first sentence that seems to match must be the one with the answer.
    sentences = list(told)
    fact, wanted, at = source.until(one, lambda found: sentences[found[2]] == found[0].sentence)
    reading = fact.read if wanted.answer.isdigit() else ""
    return question, shown(at + 1) + reading, wanted.answer


def _worded(source: Source, fact: Fact, wanted: Asks) -> tuple[str, Sought]:
    """Return the question and its short form."""
    wording = wanted.wording
    nouns = wording.nouns if source.chance(0.4) else ()
    said = asked(source, questions=wording.questions, nouns=nouns)
    names = [name for _, name, _, _ in Formatter().parse(said) if name]
    given = [_bare(fact.slots[name]) for name in names if name not in _VERB_SLOTS]
    return said.format(**fact.slots), Sought(*wanted.about(fact), tuple(dict.fromkeys(given)))


def in_layout(source: Source, text: str, question: str) -> str:
    """Put a text and a question into one message."""
    layout = source.frame(_TEXTS.layouts).replace("\\n", "\n")
    return layout.format(t=text, q=question)


def reading(source: Source) -> Turn:
    """Return a text with a question about it."""
    pool, facts, text = make_text(source, source.choice((1, 2, 2, 3, 3, 3, 4, 5)))
    question, reasoning, answer = ask(pool, facts)
    return Turn(in_layout(source, text, question), reasoning, answer, text, "reading", (text,))
