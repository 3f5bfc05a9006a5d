"""Questions about a short text: who, where, what, when, how many.

A text is a few facts about different people, places and things, so every question has one answer;
or the text does not say. The reasoning says what is asked and copies the text up to the
sentence that answers.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from string import Formatter

from evals.numbers import say
from evals.wordings import Source, asked, lines
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
_LAYOUTS = lines("""
    {t} {q}
    {t}\\n{q}
    {t}\\n\\n{q}
    {t}\\n\\nQuestion: {q}
    [Text|Passage|Story|Paragraph|Context|Note|Facts]: {t}\\n[Question|Q|My question]: {q}
    [Text|Passage|Story|Paragraph|Context|Note|Facts]: {t}\\n{q}
    [Text|Passage|Context]: {t} [Question|Q]: {q}
    [Read|Consider|Look at|Take] [this|the following|this text|this story|the text below|this short text]: {t} {q}
    [Read|Consider] [this|the following|the text|it] and [answer|answer my question|tell me]. {t} {q}
    {q}\\n{t}
    {q} [Text|Passage|Here is the text|The text|Use this|Context|Story]: {t}
    [Here is|This is|Here's] [a text|a story|a note|a passage|a short text|what I know|what happened]: {t}\\n{q}
    [Question|Q]: {q}\\n[Text|Passage|Context]: {t}
    "{t}" {q}
    "{t}"\\n{q}
    [Given|Knowing|We know|I know] [that|this|the following]: {t} {q}
    [Answer from|Use|Using] [the text|this text|the story|this]: {t}\\n{q}
    {t} [So|Now|And now|Tell me|Now tell me|My question|Question]: {q}
    [According to|Based on|From] [this text|this|the story|the following]: {t}\\n{q}
    [Answer the question|Answer with the text|Answer this]. {q} {t}
    [I read|I heard|They say|My friend wrote|The paper says]: {t} {q}
    [They|People|My friends] say: {t}\\n{q}
    [I heard|I read|The paper wrote] [this|the following]: {t} {q}
    [A friend|My friend|My mother] [wrote|told me|says]: {t} {q}
    [Here's|Here is|This is] what happened: {t} {q}
    {q} [Using|From|Use] [this|the story|this text]: {t}
""")
_NO_FACTS = lines("""
    It was a [sunny|cold|rainy|quiet|busy|warm|nice|long] [day|morning|evening|week].
    The weather was [good|bad|fine|cold|warm].
    [Everybody|Everyone|Nobody] was [happy|tired|hungry|late].
    It [rained|snowed] all [day|night|morning].
    [Then|Soon|Later] it [got dark|was late|was time to go].
    [They|All of them] had a [good|great|hard] time.
    This is [a short story|what happened|all we know].
""")


@dataclass(frozen=True, slots=True)
class Asks:
    """What asks for one answer: whole questions, and noun phrases."""

    answer: str
    questions: tuple[str, ...]
    nouns: tuple[str, ...] = ()
    kind: str = ""
    """What it is about, in a word, where that is not what its fact is about."""
    role: str = ""
    """What of it is asked; the first question's first word unless told otherwise."""

    def about(self, fact: "Fact") -> tuple[str, str]:
        first = re.match(r"\W*(\w+)", self.questions[0])
        assert first is not None
        return self.kind or fact.kind, self.role or first[1].lower()


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, and what it answers. `slots` fill the questions' braces; `subject` is a person
    the next sentence may call he or she.
    """

    sentence: str
    slots: dict[str, str]
    asks: tuple[Asks, ...]
    subject: str = ""
    read: str = ""
    """What a number in words is in digits."""
    who: str = ""
    """Whom he or she is."""
    kind: str = ""
    """What it is about, in a word (`_KINDS`)."""

    def tells(self, given: str) -> bool:
        """True if what a question gives is said of this fact."""
        return given in {_bare(value) for value in self.slots.values()}


class Pool:
    """Draws names and words for one text, never the same one twice."""

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


_VERBS = [
    verb.split("/")
    for verb in [
        "bought/buy/bought",
        "found/find/found",
        "lost/lose/lost",
        "saw/see/seen",
        "painted/paint/painted",
        "broke/break/broken",
        "sold/sell/sold",
        "cleaned/clean/cleaned",
        "carried/carry/carried",
        "hid/hide/hidden",
        "took/take/taken",
        "brought/bring/brought",
        "made/make/made",
        "opened/open/opened",
        "dropped/drop/dropped",
        "washed/wash/washed",
        "fixed/fix/fixed",
        "borrowed/borrow/borrowed",
        "kept/keep/kept",
        "drew/draw/drawn",
        "stole/steal/stolen",
        "wanted/want/wanted",
        "needed/need/needed",
        "used/use/used",
        "picked/pick/picked",
        "moved/move/moved",
        "left/leave/left",
        "forgot/forget/forgotten",
        "threw/throw/thrown",
        "built/build/built",
        "packed/pack/packed",
        "ordered/order/ordered",
        "caught/catch/caught",
        "counted/count/counted",
        "wore/wear/worn",
        "repaired/repair/repaired",
        "sent/send/sent",
        "showed/show/shown",
        "held/hold/held",
    ]
]
_GOES = "[went|walked|ran|drove|travelled|came|hurried|moved|cycled|returned]"
_STAYS = "[slept|waited|sat|stood|played|worked|sang|rested|danced|ate lunch|studied|stayed]"
_WHO = (
    "Who {v} {o}?",
    "Who was it that {v} {o}?",
    "[Tell me who|Say who|Who exactly|Do you know who] {v} {o}?",
    "Which person {v} {o}?",
    "By whom was {o} {pp}?",
)
_WHO_NOUNS = ("the [name of the |]person who {v} {o}", "who {v} {o}", "the one who {v} {o}")
_WHAT = (
    "What did {n} {b}?",
    "What was it that {n} {v}?",
    "[What thing|Which thing] did {n} {b}?",
    "What was {pp} by {n}?",
    "{n} {v} what?",
)
_WHAT_NOUNS = ("what {n} {v}", "the thing [that |]{n} {v}")
_WHERE = (
    "Where did {n} {b} {o}?",
    "Where was {o} {pp}[ by {n}|]?",
    "In [what|which] place did {n} {b} {o}?",
    "Where was it that {n} {v} {o}?",
    "In which place was {o} {pp}?",
)
_WHERE_NOUNS = ("the place where {n} {v} {o}", "where {n} {v} {o}")
_WHEN = (
    "When did {n} {b} {o}?",
    "When was {o} {pp}[ by {n}|]?",
    "[On which day|On what day|At what time] did {n} {b} {o}?",
)
_WHEN_NOUNS = ("when {n} {v} {o}", "the [day|time] when {n} {v} {o}")
_MANY = (
    "How many {t} did {n} {b}?",
    "How many {t} were {pp}[ by {n}|]?",
    "How many {t} were there?",
    "What number of {t} did {n} {b}?",
)
_MANY_NOUNS = ("the number of {t} [that |]{n} {v}", "how many {t} {n} {v}")
_COLOUR = (
    "What colour [is|was] the {t}?",
    "What color [is|was] the {t}[ of {n}|]?",
    "Which colour [has|had] the {t}?",
    "What is the colour of the {t}?",
    "In which colour is the {t}?",
)
_COLOUR_NOUNS = ("the colour of the {t}", "what colour the {t} is")


def _bare(words: str) -> str:
    return re.sub(r"^(the|an?) ", "", words)


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _act(pool: Pool) -> Fact:
    """Somebody did something to a thing, somewhere, some day."""
    source = pool.source
    n, (v, b, pp) = pool.draw(NAMES), source.choice(_VERBS)
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
        asks = [Asks(k, _MANY, _MANY_NOUNS, "count"), Asks(obj, _WHAT, _WHAT_NOUNS)]
    else:
        t, colour = pool.draw(THINGS), source.choice(COLOURS) if source.chance(0.35) else ""
        full = f"{colour} {t}".strip()
        obj = said = _a(full) if source.chance(0.5) else f"the {full}"
        slots |= {"o": f"the {t}", "t": t}
        asks = [Asks(obj, _WHAT, _WHAT_NOUNS)]
        if colour:
            asks.append(Asks(colour, _COLOUR, _COLOUR_NOUNS, "colour"))
    asks.append(Asks(n, _WHO, _WHO_NOUNS))
    if source.chance(0.4):
        prep, p = source.choice(("in", "at", "near", "behind", "in")), pool.draw(PLACES)
        said += f" {prep} the {p}"
        asks.append(
            Asks(f"the {p}" if prep in ("in", "at") else f"{prep} the {p}", _WHERE, _WHERE_NOUNS)
        )
    early = ""
    if source.chance(0.25):
        day = source.choice(WEEKDAYS)
        when, answer = source.choice(
            (
                (f"on {day}", day),
                ("yesterday", "yesterday"),
                ("in the morning", "in the morning"),
                (f"last {day}", f"last {day}"),
                ("in the evening", "in the evening"),
                (f"on {day}", day),
                ("at noon", "at noon"),
                ("today", "today"),
            )
        )
        asks.append(Asks(answer, _WHEN, _WHEN_NOUNS))
        if source.chance(0.4):
            early = when[0].upper() + when[1:] + ("," if source.chance(0.6) else "") + " "
        else:
            said += f" {when}"
    if not early and said == obj and not many and source.chance(0.2):
        return Fact(f"{obj[0].upper()}{obj[1:]} was {pp} by {n}.", slots, tuple(asks), n)
    return Fact(f"{early}{n} {v} {said}.", slots, tuple(asks), n, read)


def _in_words(source: Source, value: str) -> tuple[str, str]:
    """A number as the text has it, and what says its digits."""
    if not source.chance(0.25):
        return value, ""
    word = say(source, int(value))
    return word, f"\n{word} = {value}"


def _told(pool: Pool, sentence: str, slots: dict[str, str], *asks: Asks, subject: str = "") -> Fact:
    return Fact(pool.source.frame(lines(sentence)).format(**slots), slots, asks, subject)


def _go(pool: Pool) -> Fact:
    n, p = pool.draw(NAMES), pool.draw(PLACES)
    slots = {"n": n, "p": p}
    return _told(
        pool,
        f"""{{n}} {_GOES} to the {{p}}.
        {{n}} {_GOES} to the {{p}} [by bus|by train|with friends|after lunch|at night|this morning].
        [Yesterday|Today|Later|On Sunday|Then], {{n}} {_GOES} to the {{p}}.
        {{n}} [is going|has gone|is on the way|was sent] to the {{p}}.
        {{n}} [left for|entered|visited|reached] the {{p}}[ this morning|].
        The {{p}} is where {{n}} went.""",
        slots,
        Asks(
            f"the {p}",
            (
                "Where did {n} go?",
                "To [which|what] place did {n} go?",
                "Where was {n} going?",
                "Where has {n} gone?",
            ),
            ("the place {n} went to", "where {n} went"),
        ),
        Asks(
            n,
            (
                "Who [went|came|travelled] to the {p}?",
                "Who has gone to the {p}?",
                "Who visited the {p}?",
                "Who was it that went to the {p}?",
            ),
            ("the person who went to the {p}", "the visitor of the {p}", "who went to the {p}"),
        ),
        subject=n,
    )


def _at(pool: Pool) -> Fact:
    n, p = pool.draw(NAMES), pool.draw(PLACES)
    prep = pool.source.choice(("in", "at", "in", "near", "behind", "outside"))
    where = f"the {p}" if prep in ("in", "at") else f"{prep} the {p}"
    slots = {"n": n, "p": p, "r": prep}
    return _told(
        pool,
        f"""{{n}} [is|was] {{r}} the {{p}}.
        {{n}} {_STAYS} {{r}} the {{p}}.
        {{n}} [likes to sit|is waiting|is hiding|works|is sleeping|has a room] {{r}} the {{p}}.""",
        slots,
        Asks(
            where,
            (
                "Where [is|was] {n}?",
                "Where can [I|we|you] find {n}?",
                "In [which|what] place is {n}?",
            ),
            ("the place where {n} is", "where {n} is"),
        ),
        Asks(
            n,
            ("Who [is|was] {r} the {p}?", "Who is it that is {r} the {p}?"),
            ("the person {r} the {p}",),
        ),
        subject=n,
    )


def _has(pool: Pool) -> Fact:
    n, t, c = pool.draw(NAMES), pool.draw(THINGS), pool.source.choice(COLOURS)
    slots = {"n": n, "t": t, "x": _a(f"{c} {t}"), "at": _a(t), "v": "had", "c": c}
    return _told(
        pool,
        """{n} [has|owns|has got|holds|carries] {x}.
        {n}'s {t} is {c}.
        The {t} [of {n}|that belongs to {n}|{n} owns] is {c}.
        The {c} {t} [belongs to|is owned by|is the one of] {n}.
        In {n}'s [hands|house|room] is {x}.""",
        slots,
        Asks(
            n,
            (
                "Who [has|owns] the {t}?",
                "Who owns {at}?",
                "Whose {t} is [it|{c}]?",
                "To whom does the {t} belong?",
            ),
            ("the owner of the {t}",),
        ),
        Asks(c, (*_COLOUR, "What color is {n}'s {t}?"), _COLOUR_NOUNS, "colour"),
        subject=n,
    )


def _count(pool: Pool) -> Fact:
    n, t, k = pool.draw(NAMES), pool.draw(COUNTED), pool.number(2, 60)
    word, read = _in_words(pool.source, k)
    slots = {"n": n, "t": t, "k": word}
    fact = _told(
        pool,
        """{n} [has|owns|has got|keeps] {k} {t}.
        {n} has a [box|bag|drawer] with {k} {t}.
        [There are|We see] {k} {t} in {n}'s [bag|room|house|car].
        The {k} {t} [belong to|are owned by] {n}.
        In {n}'s [bag|room|house] there are {k} {t}.""",
        slots,
        Asks(
            k,
            (
                "How many {t} does {n} have?",
                "How many {t} [are there|belong to {n}]?",
                "How many {t} has {n} got?",
            ),
            ("the number of {t} {n} has", "the number of {t}"),
        ),
        Asks(
            n,
            ("Who has [{k} |the ]{t}?", "Who owns {k} {t}?"),
            ("the person with {k} {t}",),
            "owner",
        ),
        subject=n,
    )
    return replace(fact, read=read)


def _gave(pool: Pool) -> Fact:
    n, m, t = pool.draw(NAMES), pool.draw(NAMES), pool.draw(THINGS)
    slots = {"n": n, "m": m, "t": t}
    return _told(
        pool,
        """{n} [gave|handed|sent|lent|passed|sold] the {t} to {m}.
        {n} [gave|handed|sent|lent|brought] {m} the {t}.
        {m} [got|received|borrowed|bought] the {t} from {n}.
        From {n}, {m} [got|received] the {t}.
        {m} [took|has|keeps] the {t} from {n}.
        {m} was [given|sent|handed] the {t} by {n}.
        The {t} [came|went] to {m} from {n}.
        {n} was the one who gave the {t} to {m}.""",
        slots,
        Asks(
            n,
            (
                "Who gave the {t} to {m}?",
                "Who gave {m} the {t}?",
                "From whom did {m} get the {t}?",
                "Who did {m} get the {t} from?",
                "Who [handed|sent|passed] the {t} to {m}?",
                "Who was it that gave {m} the {t}?",
            ),
            ("the person who gave {m} the {t}", "the giver of the {t}", "who {m} got the {t} from"),
            role="from",
        ),
        Asks(
            f"the {t}",
            (
                "What did {n} give to {m}?",
                "What did {m} get[ from {n}|]?",
                "What did {n} give away?",
            ),
            ("the thing {m} got from {n}",),
        ),
        Asks(
            m,
            (
                "Who [got|received] the {t}?",
                "Who did {n} give the {t} to?",
                "To whom did {n} give the {t}?",
                "Who [took|got|received] the {t} from {n}?",
                "Who was given the {t}[ by {n}|]?",
            ),
            ("the person who got the {t}", "the receiver of the {t}", "who {n} gave the {t} to"),
            role="to",
        ),
    )


def _age(pool: Pool) -> Fact:
    n, k = pool.draw(NAMES), pool.number(2, 90)
    return _told(
        pool,
        """{n} is {k} years old.
        {n} is {k}.
        {n} [turned|became] {k} [last week|in May|yesterday].
        {n}, who is {k} [years old|years of age], [is here|likes music|lives nearby].
        The age of {n} is {k}.
        {n} has been {k} [years old |]for a month.""",
        {"n": n, "k": k},
        Asks(
            k,
            (
                "How old is {n}?",
                "What age is {n}?",
                "What is the age of {n}?",
                "How many years old is {n}?",
            ),
            ("the age of {n}", "{n}'s age", "how old {n} is"),
        ),
        Asks(
            n,
            ("Who is {k}[ years old|]?", "Which person is {k} years old?"),
            ("the person who is {k}",),
        ),
        subject=n,
    )


def _pet(pool: Pool) -> Fact:
    n, a, m = pool.draw(NAMES), pool.draw(ANIMALS), pool.draw(NAMES)
    return _told(
        pool,
        """{n} [has|owns|keeps] {x} [named|called] {m}.
        {n}'s {a} is [named|called] {m}.
        {m} is the {a} of {n}.
        {n} has {x}, and it is called {m}.
        The {a} of {n} is [called|named] {m}.
        {m}, {x}, belongs to {n}.""",
        {"n": n, "a": a, "m": m, "x": _a(a)},
        Asks(
            m,
            (
                "What is the name of the {a}?",
                "What is {n}'s {a} called?",
                "What is the {a} called?",
                "How is the {a} called?",
            ),
            ("the name of [the|{n}'s] {a}", "the {a}'s name"),
        ),
        Asks(
            n,
            ("Who [has|owns] {x}?", "Who is {m}'s owner?", "Whose {a} is {m}?"),
            ("the owner of {m}", "the owner of the {a}"),
            "owner",
        ),
        Asks(
            _a(a),
            ("What [animal|pet] does {n} have?", "[Which|What kind of] animal is {m}?"),
            ("the [pet|animal] of {n}",),
        ),
        subject=n,
    )


def _thing_at(pool: Pool) -> Fact:
    t, p = pool.draw(THINGS), pool.draw(PLACES)
    prep = pool.source.choice(("in", "in", "at", "behind", "near", "under", "on"))
    if prep in ("under", "on"):
        p = pool.source.choice(("table", "bed", "chair", "desk", "roof", "floor", "shelf"))
        if p in pool.used:
            p = pool.draw(PLACES)
        pool.used.add(p)
    where = f"the {p}" if prep in ("in", "at") else f"{prep} the {p}"
    return _told(
        pool,
        """The {t} [is|was|lies|stands|is lying|is kept|can be found] {r} the {p}.
        There is {x} {r} the {p}.
        [Somebody|Someone|They|We] [put|left|hid] the {t} {r} the {p}.
        You [can see|find|get] the {t} {r} the {p}.
        The {t} [was left|was seen|stayed|is still] {r} the {p}.""",
        {"t": t, "p": p, "r": prep, "x": _a(t)},
        Asks(
            where,
            (
                "Where is the {t}?",
                "Where [can I find|do I find|should I look for] the {t}?",
                "Where was the {t}?",
            ),
            ("the place of the {t}", "where the {t} is"),
        ),
        Asks(
            f"the {t}",
            (
                "What is {r} the {p}?",
                "What [can be found|lies|is there] {r} the {p}?",
                "Which thing is {r} the {p}?",
            ),
            ("the thing {r} the {p}",),
        ),
    )


def _likes(pool: Pool) -> Fact:
    n, f = pool.draw(NAMES), pool.draw(FOODS)
    return _told(
        pool,
        """{n} [likes|loves|eats|wants|prefers|orders|always has] {f}.
        {n} [ate|had|cooked|ordered] {f} [for lunch|for dinner|for breakfast|last night].
        {n}'s favourite [food|dish|meal] is {f}.
        The favourite [food|dish] of {n} is {f}.
        {n} [asked for|paid for|would like] {f}.""",
        {"n": n, "f": f},
        Asks(
            f,
            (
                "What does {n} [like|eat|want]?",
                "What did {n} [have|eat]?",
                "What is {n}'s favourite food?",
                "Which food does {n} like?",
            ),
            ("the food {n} likes", "the food of {n}"),
        ),
        Asks(
            n,
            ("Who [likes|loves|wants|eats] {f}?", "Who [ate|had] {f}?", "Who is the one with {f}?"),
            ("the person who likes {f}",),
        ),
        subject=n,
    )


def _job(pool: Pool) -> Fact:
    n, j = pool.draw(NAMES), pool.draw(JOBS)
    return _told(
        pool,
        """{n} is {x}.
        {n} works as {x}.
        {n} [became|was|wants to be] {x}[ for ten years| last year|].
        The {j} is [called|named] {n}.
        The name of the {j} is {n}.
        {n} [has worked|is working|started] as {x}[ since May|].
        Our {j}, {n}, [is here|likes music|lives nearby].""",
        {"n": n, "j": j, "x": _a(j)},
        Asks(
            _a(j),
            (
                "What is {n}'s [job|work|profession]?",
                "What does {n} do[ for work| for a living|]?",
                "What is {n} by profession?",
                "As what does {n} work?",
            ),
            ("{n}'s [job|profession]", "the [job|profession|work] of {n}"),
        ),
        Asks(
            n,
            ("Who is the {j}?", "Who works as {x}?", "What is the {j} called?"),
            ("the name of the {j}",),
        ),
        subject=n,
    )


def _city(pool: Pool) -> Fact:
    n, c = pool.draw(NAMES), pool.draw(CITIES)
    return _told(
        pool,
        """{n} [lives|was born|works|grew up|studies|has a house] in {c}.
        {n} [comes from|is from|moved to|flew to|travelled to|visited] {c}.
        The home of {n} is [in |]{c}.
        {n}'s [home|house|family] is in {c}.
        In {c} lives {n}.""",
        {"n": n, "c": c},
        Asks(
            c,
            (
                "Where [does {n} live|is {n} from|does {n} come from|was {n}]?",
                "[In which|Which] city [is it for {n}|does {n} know]?",
                "Which city is {n} [in|from]?",
            ),
            ("the city of {n}", "{n}'s city"),
        ),
        Asks(
            n,
            (
                "Who [lives in|is from|comes from|went to|is in] {c}?",
                "Which person is [in|from] {c}?",
            ),
            ("the person [in|from] {c}",),
        ),
        subject=n,
    )


def _relative(pool: Pool) -> Fact:
    n, m = pool.draw(NAMES), pool.draw(NAMES)
    r = pool.source.choice(
        [
            "brother",
            "sister",
            "friend",
            "teacher",
            "boss",
            "neighbour",
            "aunt",
            "uncle",
            "cousin",
            "doctor",
            "son",
            "daughter",
        ]
    )
    return _told(
        pool,
        """{n} is {m}'s {r}.
        {n} is the {r} of {m}.
        {m}'s {r} is [called |named |]{n}.
        {m} has {x} [called|named] {n}.
        The {r} of {m} is [called |named |]{n}.
        {n}, {m}'s {r}, [is here|likes music|lives nearby].
        {n}, the {r} of {m}, [is here|called|wrote].""",
        {"n": n, "m": m, "r": r, "x": _a(r)},
        Asks(
            n,
            (
                "Who is {m}'s {r}?",
                "Who is the {r} of {m}?",
                "What is {m}'s {r} called?",
                "What is the name of {m}'s {r}?",
            ),
            ("the {r} of {m}", "the name of {m}'s {r}"),
        ),
        Asks(m, ("Whose {r} is {n}?", "Who has {x} called {n}?")),
    )


def _price(pool: Pool) -> Fact:
    t, k = pool.draw(THINGS), pool.number(2, 99)
    return _told(
        pool,
        """The {t} [costs|cost] {k} [dollars|euros|pounds|coins].
        The price of the {t} is {k} [dollars|euros|pounds].
        [You pay|We paid|They want] {k} [dollars|euros|pounds] for the {t}.
        The {t} is [sold|offered|yours] for {k} [dollars|euros|pounds].
        The {t} has a price of {k} [dollars|euros|coins].
        For the {t} [we paid|they want|you pay] {k} [dollars|euros|pounds].""",
        {"t": t, "k": k},
        Asks(
            k,
            (
                "How much [does the {t} cost|is the {t}|did the {t} cost]?",
                "What does the {t} cost?",
                "What is the price of the {t}?",
            ),
            ("the price of the {t}", "the cost of the {t}"),
        ),
        Asks(f"the {t}", ("What costs {k}?", "What has a price of {k}?", "Which thing costs {k}?")),
    )


def _event(pool: Pool) -> Fact:
    e = pool.draw(
        [
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
            "trip",
        ]
    )
    d, k = pool.source.choice(WEEKDAYS), pool.number(1, 12)
    at_hour = pool.source.chance(0.4)
    slots = {"e": e, "d": d, "k": k}
    if at_hour:
        return _told(
            pool,
            """The {e} [starts|begins|is|opens] at {k} o'clock.
            The {e} [starts|begins|is] at {k}.""",
            slots,
            Asks(
                k,
                (
                    "[When|At what time|At which hour] does the {e} [start|begin]?",
                    "What time is the {e}?",
                ),
                ("the hour of the {e}",),
            ),
            Asks(f"the {e}", ("What [starts|begins|is] at {k}?",)),
        )
    return _told(
        pool,
        """The {e} is on {d}.
        The {e} [starts|begins|was|takes place|will be|happens] on {d}.
        [We have|There is|They planned] the {e} on {d}.
        On {d} [we have|there is|comes] the {e}.
        The day of the {e} is {d}.""",
        slots,
        Asks(
            d,
            (
                "When is the {e}?",
                "[On which day|On what day|When] [is|was|does] the {e}[ happen|]?",
                "What day is the {e}?",
            ),
            ("the day of the {e}",),
        ),
    )


def _compared(pool: Pool) -> Fact:
    n, m = pool.draw(NAMES), pool.draw(NAMES)
    more, less = pool.source.choice(
        (
            ("taller", "shorter"),
            ("older", "younger"),
            ("faster", "slower"),
            ("stronger", "weaker"),
            ("bigger", "smaller"),
            ("richer", "poorer"),
        )
    )
    if pool.source.chance(0.4):
        more, less = less, more
    return _told(
        pool,
        """{n} is {g} than {m}.
        {n} is [much|a little|a bit] {g} than {m}.
        {n} [was|became|seems] {g} than {m}.
        Of {n} and {m}, {n} is {g}.
        Compared to {m}, {n} is {g}.""",
        {"n": n, "m": m, "g": more, "l": less},
        Asks(
            n,
            ("Who is {g}?", "Who is {g}, {n} or {m}?", "Which of them is {g}?"),
            ("the {g} [one|person]",),
        ),
        Asks(
            m,
            ("Who is {l}?", "Who is {l}, {n} or {m}?", "Which of them is {l}?"),
            ("the {l} [one|person]",),
        ),
    )


_MAKERS = (
    *(_act,) * 7,
    _go,
    _go,
    _at,
    _at,
    _has,
    _count,
    _gave,
    _gave,
    _age,
    _pet,
    _thing_at,
    _thing_at,
    _likes,
    _job,
    _city,
    _relative,
    _price,
    _event,
    _compared,
)
_KINDS: dict[Callable[[Pool], Fact], str] = {
    _act: "did",
    _has: "owner",
    _count: "count",
    _gave: "give",
    _age: "age",
    _pet: "animal",
    _likes: "food",
    _job: "job",
    _relative: "person",
    _price: "price",
    _event: "time",
    _compared: "size",
}
"""What a fact is about; the others are places."""
_VERB_SLOTS = {"v", "b", "pp"}
_SHE = set(
    [
        "Anna",
        "Clara",
        "Emma",
        "Grace",
        "Ida",
        "Kate",
        "Maria",
        "Olga",
        "Rosa",
        "Vera",
        "Zoe",
        "Bella",
        "Dora",
        "Fiona",
        "Hana",
        "Julia",
        "Lucy",
        "Nina",
        "Petra",
        "Ruth",
        "Tina",
        "Wanda",
        "Alice",
        "Mary",
        "Lisa",
        "Sara",
        "Eva",
        "Priya",
        "Mia",
    ]
)


def make_text(source: Source, num_facts: int) -> tuple[Pool, list[Fact], str]:
    """Return a text of so many facts."""
    pool = Pool(source)
    facts: list[Fact] = []
    last = None
    while len(facts) < num_facts:
        maker = source.choice(_MAKERS)
        fact = _made(pool, maker)
        # Of one person no text says two ages, or two places.
        differ = maker is not last and not {maker, last} <= {_go, _at, _city}
        if facts and facts[-1].subject in NAMES and fact.subject and source.chance(0.2) and differ:
            fact = _same_person(fact, facts[-1].subject, source) or fact
        facts.append(fact)
        last = maker
    if source.chance(0.12):
        place = source.randint(0, len(facts))
        facts.insert(place, Fact(source.frame(_NO_FACTS), {}, ()))
    if source.chance(0.12):
        said = jumble(source, source.randint(3, 8))
        place = source.randint(0, len(facts))
        facts.insert(place, Fact(f"{said[0].upper()}{said[1:]}.", {}, ()))
    if num_facts > 1 and source.chance(0.22):
        facts = _joined(source, facts, source.randrange(len(facts) - 1))
    return pool, facts, " ".join(_read(facts))


def _made(pool: Pool, maker: Callable[[Pool], Fact]) -> Fact:
    return replace(maker(pool), kind=_KINDS.get(maker, "place"))


def _read(facts: Sequence[Fact]) -> dict[str, str]:
    """The sentences of a text, one that says two facts once, each with whom he or she is in it."""
    found: dict[str, str] = {}
    for fact in facts:
        found[fact.sentence] = found.get(fact.sentence, fact.sentence) + fact.who
    return found


def _joined(source: Source, facts: list[Fact], first: int) -> list[Fact]:
    """The facts with two neighbours in one sentence."""
    one, two = facts[first], facts[first + 1]
    word = two.sentence.split(" ", 1)[0]
    rest = two.sentence
    if word.rstrip(",") in (
        "The",
        "There",
        "He",
        "She",
        "A",
        "An",
        "It",
        "They",
        "We",
        "Somebody",
        "Yesterday",
        "In",
        "At",
        "On",
        "Then",
        "You",
        "For",
        "From",
        "Of",
        "Our",
        "Compared",
    ):
        rest = rest[0].lower() + rest[1:]
    glue = source.choice((", and ", " and ", ", but ", " while ", "; ", ", "))
    sentence = f"{one.sentence[:-1]}{glue}{rest}"
    both = [replace(fact, sentence=sentence) for fact in (one, two)]
    return [*facts[:first], *both, *facts[first + 2 :]]


def _same_person(fact: Fact, name: str, source: Source) -> Fact | None:
    """The fact as one of the person before, who is called he or she."""
    if not fact.sentence.startswith(f"{fact.subject} "):
        return None
    who = "She" if name in _SHE else "He"
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
    """What a question is about in short: its kind, what of it is asked, and what is given."""

    kind: str
    role: str
    given: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join([f"{self.kind} {self.role}", *self.given])

    def looked_for(self, facts: Sequence[Fact]) -> tuple[str, bool]:
        """How far the facts of one sentence tell it, and whether one tells it all: their kind, and
        then one after the other what is given, up to what none of them says.
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
            # The text may say it the other way round.
            turned = f" as {fact.slots['g']}" if each == fact.slots.get("l") else ""
            looked.append(f"{each}{turned} yes")
        return ", ".join(looked), True


def ask(pool: Pool, facts: list[Fact]) -> tuple[str, str, str]:
    """Return (question, reasoning, answer) about a text. The reasoning begins with what is asked,
    then reads one sentence after the other, behind a dash and a space as it stands in the text,
    each with how far it tells that, until one does.
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
            with source.aside():  # Its sentence is not shown.
                fact = _made(pool, source.choice(_MAKERS[:-1]))
            look(fact, source.choice(fact.asks))
            return not any(is_told for _, is_told in read)

        source.until(other, bool)
        return question, f"{shown(len(read))}\nThat is not in the text.", NOT_SAID

    def one() -> tuple[Fact, Asks, int]:
        fact = source.choice([fact for fact in facts if fact.asks])
        wanted = source.choice(fact.asks)
        look(fact, wanted)
        return fact, wanted, [is_told for _, is_told in read].index(True)

    # The first sentence that seems to tell it has to be the one that does.
    sentences = list(told)
    fact, wanted, at = source.until(one, lambda found: sentences[found[2]] == found[0].sentence)
    reading = fact.read if wanted.answer.isdigit() else ""
    return question, shown(at + 1) + reading, wanted.answer


def _worded(source: Source, fact: Fact, wanted: Asks) -> tuple[str, Sought]:
    """The question, and what it is about in short."""
    said = asked(
        source, questions=wanted.questions, nouns=wanted.nouns if source.chance(0.4) else ()
    )
    names = [name for _, name, _, _ in Formatter().parse(said) if name]
    given = [_bare(fact.slots[name]) for name in names if name not in _VERB_SLOTS]
    return said.format(**fact.slots), Sought(*wanted.about(fact), tuple(dict.fromkeys(given)))


def in_layout(source: Source, text: str, question: str) -> str:
    """Put a text and a question into one message."""
    layout = source.frame(_LAYOUTS).replace("\\n", "\n")
    return layout.format(t=text, q=question)


def reading(source: Source) -> Turn:
    """Return a text with a question about it."""
    pool, facts, text = make_text(source, source.choice((1, 2, 2, 3, 3, 3, 4, 5)))
    question, reasoning, answer = ask(pool, facts)
    return Turn(in_layout(source, text, question), reasoning, answer, text, "reading", (text,))
