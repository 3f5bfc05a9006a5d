"""Second turns: questions that only make sense with the turn before them.

Each maker takes a source of choices and returns the earlier turn and the one that refers to it.
"""

from evals.lists import (
    a_word,
    count_turn,
    reason_count,
    reason_length,
    reason_reverse,
    reason_reverse_word,
    reverse,
    sort,
)
from evals.numbers import (
    arithmetic,
    dates,
    number,
    operate,
    reason_after,
    reason_before,
    reason_weekday,
    span,
)
from evals.smalltalk import name_turn
from evals.texts import ask, in_layout, make_text
from evals.wordings import Source, asked, lines
from evals.words import MONTHS, WEEKDAYS, Turn

_FLIP = lines("""
    [Now|And now|Ok, now|Next] [sort it|order them|put it|list them] the other way[ round| around|].
    [Now|And] the other way[ round| around|][, please|?|.]
    [Now|And now|Next] [reverse|flip|turn round|invert] [it|that|this|the list|the order|them].
    Reverse that [list|order].
    [And|What about|How about] [the other way round|in reverse|backwards|the opposite order]?
    [Now|And now] in [reverse|the opposite] order.
    [Now|And now] backwards[, please|].
    Flip [it|that|the list|the order].
    [Can|Could|Would] you [reverse|flip|turn round|invert] [it|that|this|the list|them]?
    The [other way round|opposite order|reverse order][ please|, please|].
    [And|Now] from the [end|back|last to the first].
    [I want|I need|Give me|Show me] [it|that|the list] the other way [round|around].
    [Start|Begin] from the [end|last one|other end] [instead|now].
    [Now|Next] [turn it|turn that|turn the list] [around|round|upside down].
    [And what is it|What is that|How is it] [reversed|backwards|in reverse]?
""")
_FIRST = lines("""
    What is the first[ one| item| of them|]?
    Which [one |item |]is first?
    What [comes|stands|is] [first|at the front|at the start]?
    And the first[ one| item|]?
    [Give|Tell|Show] me [only |just |]the first[ one| item| of these|].
    Only the first[ one|][, please|].
    [Which|What] did you put first?
    What is at the [top|beginning|front] of [the list|it]?
""")
_LAST = lines("""
    What is the last[ one| item| of them|]?
    Which [one |item |]is last?
    What [comes|stands|is] [last|at the end|at the back]?
    And the last[ one| item|]?
    [Give|Tell|Show] me [only |just |]the last[ one| item| of these|].
    Only the last[ one|][, please|].
    [Which|What] did you put last?
    What is at the [bottom|end] of [the list|it]?
""")
_OPS = {
    "+": lines("""
        [Now|And now|Next|Then|Ok, now|Please] add {b}[ to it| to that| more|].
        Add {b} [to that|to it|more|to the result|on top].
        [And |]plus {b}[?|]
        [What if|And if] [you|I|we] add {b}?
        [Now|And now] {b} more.
        [Increase|Raise] [it|that|the result] by {b}.
        [What is|What's|How much is] that plus {b}?
        [And|Now] with {b} [more|added|on top]?
        [Put|Throw] {b} on top[ of it| of that|].
        [I get|I find|We get] {b} more. [How many|How much] [now|is it now|is that]?
    """),
    "-": lines("""
        [Now|And now|Next|Then|Ok, now|Please] subtract {b}[ from it| from that|].
        Subtract {b} from [that|it|the result].
        [And |]minus {b}[?|]
        [Now |And now |]take [away {b}|{b} away|{b} off|{b} from it|{b} from that].
        [What if|And if] [you|I|we] [subtract|take away|remove] {b}?
        [Reduce|Lower|Decrease] [it|that|the result] by {b}.
        [What is|What's|How much is] that minus {b}?
        [And|Now] {b} less[?|]
        [I lose|I spend|We give away] {b}. [How many|How much] [now|is left|is that]?
        [And|Now] without {b}?
    """),
    "*": lines("""
        [Now|And now|Next|Then|Please] multiply [it |that |]by {b}.
        [And |]times {b}[?|]
        Multiply [that|it|the result] by {b}.
        [Now|And now] times {b}.
        [What is|What's|How much is] that times {b}?
        [And|Now] {b} times [as much|that|as many]?
        [What if|And if] [you|I|we] multiply [it |that |]by {b}?
        [Take|Count] that {b} times.
    """),
}
_DOUBLE = lines("""
    [Now|And now|Please] double [it|that|the result].
    [And|What is|Now] twice that?
    [What is|How much is] the double of [it|that]?
    [Now|And] two times that.
""")
_BACK = lines("""
    [Now |And now |]reverse [it|that] [back|again].
    [And |]backwards again?
    [Now|And now|Next] reverse it.
    Turn it [around|round] again.
    [And|And what is it] reversed?
    [Flip|Mirror|Invert] [it|that] [again|back|once more].
    [Undo that|Undo the reversal|Back to the original, please].
    [Read|Write|Spell] that backwards[ again| now|].
    [What|Which] word is [it|that] [backwards|reversed|if you turn it round]?
    [And|Now] the other way round[ again|].
""")
_OTHER_LETTER = lines("""
    [And|Now|What about|How about] {c}?
    [And|Now|What about|How about] the letter {c}?
    [And |Now |]how many {c}?
    [And|Also|Now] count [the |]{c}.
    [And|Now] how often is {c} in it?
    [The same|Same question|Do the same|Now the same] [for|with] {c}[, please|].
    Is there [any|a] {c} in it? How many?
    [And the number of|Now the number of] {c}'s?
""")
_OTHER_WORD = lines("""
    [And|Now|What about|How about] [in |in the word |]{w}?
    How many [in|are in|does it have in] {w}?
    [The same|Same question|Do the same|Now the same] [for|with] [the word |]{w}[, please|].
    [And if|What if] the word is {w}?
    [Now|Next] [take|try] {w}.
""")
_LONG = lines("""
    How many letters [does it have|is that|are there|has it got|are in it|make it up]?
    How long is [it|that|the word]?
    How many letters[ now|]?
    [And|What is] [its|the] length?
    [Count|Now count] [its|the] letters[, please|].
    [And|Now] the number of letters?
    [Tell me|And] how long [it|the word] is[, please|].
""")
_LATER = lines("""
    [And|And what is] {n} later?
    [And |]{n} after that?
    What about {n} later?
    Plus {n} more[?|]
    [And|Now] [another|a further|add] {n}?
    [And|Now|Then] {n} [on|further|more|forward]?
    [What|Which] [day|date] is [it |]{n} [later|after that|from then]?
    [Now|Next] [add|go|count] {n} [more|forward|on].
    If [it takes|we wait|I wait|you add] {n} [more|longer], [when is that|what is it then]?
""")
_EARLIER = lines("""
    [And|And what is] {n} earlier?
    [And |]{n} before that?
    What about {n} earlier?
    [And|Now] {n} back?
    [And|Now|Then] minus {n}?
    [What|Which] [day|date] [is|was] [it |]{n} [earlier|before that]?
    [Now|Next] [go|count] {n} back.
    [Now|And] {n} [less|sooner]?
""")
_MY_NAME = lines("""
    What is my name?
    [Who am I|And who am I]?
    [Do|Did] you [know|remember|recall|remember what is] my name?
    What's my name[ again|]?
    Say my name[ please|].
    [Tell me|Repeat|Spell out] [my name|what I am called][ again|].
    What am I called?
    [How|What] do [people|they|friends] call me?
    [What|Which] name did I [tell you|say|give you]?
    [Have you forgotten|Did you forget] my name?
    [What did I say|I forgot,] what is my name?
    [Who is|Who's] [speaking|talking|writing] to you?
""")


def _after_list(source: Source) -> tuple[Turn, Turn]:
    first = source.until(lambda: sort(source), lambda turn: turn.kind == "list")
    items = list(first.subject)
    kind = source.random()
    if kind < 0.6:
        answer, reasoning = ", ".join(reversed(items)), reason_reverse(items)
        question, key = asked(source, whole=_FLIP), f"reverse {items}"
    else:
        at_end = kind > 0.8
        answer = items[-1 if at_end else 0]
        numbered = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
        reasoning = f"order {'last' if at_end else 'first'}: {numbered}"
        question, key = asked(source, whole=_LAST if at_end else _FIRST), first.key
    return first, Turn(question, reasoning, answer, key)


def _after_number(source: Source) -> tuple[Turn, Turn]:
    op = source.choice("++--*")
    most = 3 if op == "*" else 4
    first = source.until(
        lambda: arithmetic(source), lambda turn: turn.answer.isdigit() and len(turn.answer) <= most
    )
    a, b = int(first.answer), number(source, 3)
    if op == "*":
        b = 2 if source.chance(0.3) else source.randint(2, 9)
    if op == "-":
        b = min(b, a)
    reasoning, answer = operate(op, a, b)
    is_double = op == "*" and b == 2 and source.chance(0.7)
    question = asked(source, whole=_DOUBLE if is_double else _OPS[op]).format(b=b)
    return first, Turn(question, f"sum: {reasoning}", answer, f"{a}{op}{b}")


def _after_word(source: Source) -> tuple[Turn, Turn]:
    first = source.until(lambda: reverse(source), lambda turn: turn.kind == "word")
    word = first.answer
    if source.random() < 0.6:
        question = asked(source, whole=_BACK)
        return first, Turn(question, reason_reverse_word(word), word[::-1], f"reverse {word}")
    question = asked(source, whole=_LONG)
    return first, Turn(question, reason_length(word), str(len(word)), f"length {word}")


def _after_count(source: Source) -> tuple[Turn, Turn]:
    word = a_word(source).lower()
    first = count_turn(source, word, word)
    letter = first.reasoning.removeprefix("count ")[0]
    if source.random() < 0.5:
        letter = source.choice(word)
        question = asked(source, whole=_OTHER_LETTER).format(c=letter)
    else:
        word = a_word(source).lower()
        question = asked(source, whole=_OTHER_WORD).format(w=word)
    reasoning = reason_count(word, letter)
    return first, Turn(question, reasoning, str(word.count(letter)), f"count {letter} {word}")


def _after_date(source: Source) -> tuple[Turn, Turn]:
    first = source.until(lambda: dates(source), lambda turn: turn.kind in ("date", "weekday"))
    days, later = source.randint(2, 20), source.random() < 0.6
    text, read = span(source, days)
    question = asked(source, whole=_LATER if later else _EARLIER).format(n=text)
    if first.kind == "weekday":
        weekday, sign = WEEKDAYS.index(first.answer), 1 if later else -1
        reasoning, answer = reason_weekday(weekday, days, sign)
        key = f"weekday {weekday} {days} {sign}"
    else:
        name, day = first.answer.split()
        month = MONTHS.index(name)
        reasoning, answer = (reason_after if later else reason_before)(month, int(day), days)
        key = f"{'after' if later else 'before'} {month} {day} {days}"
    return first, Turn(question, f"{first.kind}: {read}{reasoning}", answer, key)


def _after_text(source: Source) -> tuple[Turn, Turn]:
    pool, facts, text = make_text(source, source.randint(2, 4))
    question, reasoning, answer = ask(pool, facts)
    first = Turn(in_layout(source, text, question), reasoning, answer, text)
    question, reasoning, answer = ask(pool, facts)
    if source.random() < 0.4:
        question = "And " + question[0].lower() + question[1:]
    return first, Turn(question, reasoning, answer, text)


def _after_name(source: Source) -> tuple[Turn, Turn]:
    first = name_turn(source)
    name = first.subject[0]
    question = asked(source, whole=_MY_NAME)
    return first, Turn(question, f"The name is {name}.", f"Your name is {name}.", first.key)


_MAKERS = (
    _after_list,
    _after_number,
    _after_word,
    _after_count,
    _after_date,
    _after_text,
    _after_name,
)


def followup(source: Source) -> tuple[Turn, Turn]:
    """Return an earlier turn and one that refers to it."""
    return source.choice(_MAKERS)(source)
