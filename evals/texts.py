"""Questions about a short text (who, where, what, how many), and small talk: greetings, who the
model is, saying something after the user, and what it cannot do.

A text is a few facts about different people, places and things, so every question has one answer;
or the text does not say. The reasoning copies it up to the sentence that answers.
"""

import random
from dataclasses import dataclass

from evals.words import (
    ALL_LOWER,
    ANIMALS,
    COLOURS,
    COUNTED,
    NAMES,
    PLACES,
    THINGS,
    Turn,
    random_letters,
)

NOT_SAID = "The text does not say."
_UNSAID_NAME = (
    "Where is {n}?",
    "What does {n} have?",
    "How old is {n}?",
    "What does {n} like?",
    "Where did {n} go?",
)
_UNSAID_THING = ("Where is the {t}?", "Who has the {t}?", "Who bought the {t}?")
_FRAMES = (
    "{t} {q}",
    "{t}\n{q}",
    "{t}\n\n{q}",
    "{t}\n\nQuestion: {q}",
    "Text: {t}\nQuestion: {q}",
    "Read this: {t} {q}",
    "Read the text and answer. {t} {q}",
    "{q}\n{t}",
    "{q} Text: {t}",
    "Here is a text: {t}\n{q}",
    "Story: {t}\n{q}",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence and the questions it answers."""

    sentence: str
    asks: tuple[tuple[str, str], ...]


class _Pool:
    """Draws names and words for one text, never the same one twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[str] = set()

    def draw(self, words: tuple[str, ...] | list[str]) -> str:
        while True:
            word = self.rng.choice(words)
            if words is NAMES and self.rng.random() < 0.06:
                word = random_letters(self.rng, 3, 6).capitalize()
            if word not in self.used:
                self.used.add(word)
                return word


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _where(pool: _Pool) -> Fact:
    n, p = pool.draw(NAMES), pool.draw(PLACES)
    verb = pool.rng.choice(("is in", "went to", "is at", "works in"))
    sentence = f"{n} {verb} the {p}."
    if "works" in sentence:
        return Fact(
            sentence, ((f"Where does {n} work?", f"the {p}"), (f"Who works in the {p}?", n))
        )
    who = (f"Who went to the {p}?", n) if "went" in sentence else (f"Who is in the {p}?", n)
    where = (
        (f"Where did {n} go?", f"the {p}") if "went" in sentence else (f"Where is {n}?", f"the {p}")
    )
    return Fact(sentence, (who, where))


def _has(pool: _Pool) -> Fact:
    n, t, c = pool.draw(NAMES), pool.draw(THINGS), pool.rng.choice(COLOURS)
    verb, ask = pool.rng.choice((("has", "have"), ("bought", "buy"), ("found", "find")))
    aux = "does" if verb == "has" else "did"
    return Fact(
        f"{n} {verb} {_a(c)} {t}.",
        (
            (f"What {aux} {n} {ask}?", f"{_a(c)} {t}"),
            (f"Who {verb} the {t}?", n),
            (f"Who {verb} {_a(t)}?", n),
            (f"What colour is the {t}?", c),
            (f"What color is {n}'s {t}?", c),
        ),
    )


def _count(pool: _Pool) -> Fact:
    n, t, k = pool.draw(NAMES), pool.draw(COUNTED), pool.rng.randint(2, 30)
    return Fact(
        f"{n} has {k} {t}.",
        (
            (f"How many {t} does {n} have?", str(k)),
            (f"Who has {k} {t}?", n),
            (f"Who has the {t}?", n),
            (f"How many {t} are there?", str(k)),
        ),
    )


def _gave(pool: _Pool) -> Fact:
    n, m, t = pool.draw(NAMES), pool.draw(NAMES), pool.draw(THINGS)
    return Fact(
        f"{n} gave the {t} to {m}.",
        (
            (f"Who gave the {t} to {m}?", n),
            (f"What did {n} give to {m}?", f"the {t}"),
            (f"Who got the {t}?", m),
            (f"Who did {n} give the {t} to?", m),
            (f"Who gave {m} the {t}?", n),
            (f"Who has the {t} now?", m),
        ),
    )


def _age(pool: _Pool) -> Fact:
    n, k = pool.draw(NAMES), pool.rng.randint(2, 90)
    while str(k) in pool.used:
        k = pool.rng.randint(2, 90)
    pool.used.add(str(k))
    return Fact(
        f"{n} is {k} years old.", ((f"How old is {n}?", str(k)), (f"Who is {k} years old?", n))
    )


def _pet(pool: _Pool) -> Fact:
    n, a, m = pool.draw(NAMES), pool.draw(ANIMALS), pool.draw(NAMES)
    return Fact(
        f"{n} has {_a(a)} named {m}.",
        (
            (f"What is the name of the {a}?", m),
            (f"Who has {_a(a)}?", n),
            (f"What animal does {n} have?", _a(a)),
            (f"What is {n}'s {a} called?", m),
            (f"Who is {m}'s owner?", n),
        ),
    )


def _thing_at(pool: _Pool) -> Fact:
    t, p = pool.draw(THINGS), pool.draw(PLACES)
    return Fact(
        f"The {t} is in the {p}.",
        ((f"Where is the {t}?", f"the {p}"), (f"What is in the {p}?", f"the {t}")),
    )


def _likes(pool: _Pool) -> Fact:
    n, a = pool.draw(NAMES), pool.draw(ANIMALS)
    plural = a + ("es" if a in ("fox", "octopus") else "s")
    if a in ("sheep", "wolf", "mouse", "goose", "donkey", "monkey", "turkey"):
        plural = a
    asks = ((f"What does {n} like?", f"the {plural}"), (f"Who likes the {plural}?", n))
    return Fact(f"{n} likes the {plural}.", asks)


_MAKERS = (_where, _where, _has, _has, _count, _gave, _age, _pet, _thing_at, _likes)


def _unsaid(pool: _Pool) -> tuple[str, str]:
    """A question about someone or something the text does not name, and the name."""
    if pool.rng.random() < 0.6:
        name = pool.draw(NAMES)
        return pool.rng.choice(_UNSAID_NAME).format(n=name), name
    thing = pool.draw(THINGS)
    return pool.rng.choice(_UNSAID_THING).format(t=thing), f"The {thing}"


def ask(pool: _Pool, facts: list[Fact]) -> tuple[str, str, str]:
    """Return (question, reasoning, answer) about a text."""
    if pool.rng.random() < 0.08:
        question, name = _unsaid(pool)
        lines = [f"{fact.sentence} no" for fact in facts]
        return question, "\n".join([*lines, f"{name} is not in the text."]), NOT_SAID
    index = pool.rng.randrange(len(facts))
    question, answer = pool.rng.choice(facts[index].asks)
    lines = [f"{fact.sentence} no" for fact in facts[:index]]
    return question, "\n".join([*lines, f"{facts[index].sentence} yes"]), answer


def make_text(rng: random.Random, num_facts: int) -> tuple[_Pool, list[Fact], str]:
    """Return a text of so many facts."""
    pool = _Pool(rng)
    facts = [rng.choice(_MAKERS)(pool) for _ in range(num_facts)]
    return pool, facts, " ".join(fact.sentence for fact in facts)


def frame(rng: random.Random, text: str, question: str) -> str:
    """Put a text and a question into one message."""
    if rng.random() < 0.1:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.1:
        question = question[:-1]
    return rng.choice(_FRAMES).format(t=text, q=question)


def reading(rng: random.Random) -> Turn:
    """Return a text with a question about it."""
    pool, facts, text = make_text(rng, rng.choice((1, 2, 2, 3, 3, 4)))
    question, reasoning, answer = ask(pool, facts)
    return Turn(frame(rng, text, question), reasoning, answer, text, "reading", (text,))


# Small talk.

HELLO = "Hello! How can I help you?"
WHO = "I am Hadal-tiny, a very small language model."
CAN = (
    "I can do small sums, sort and reverse things, count letters, work with dates, "
    "and answer questions about a short text."
)
CANNOT = "Sorry, I am too small to know that. " + CAN
FINE = "I am fine, thank you! How can I help you?"
WELCOME = "You are welcome!"
BYE = "Goodbye!"

# (what the user says, what kind of message it is, the answer)
_SAID = (
    (
        (
            "hello",
            "hi",
            "hey",
            "hello there",
            "hi there",
            "hey there",
            "good morning",
            "good evening",
            "good afternoon",
            "greetings",
            "hello hadal",
            "hi hadal",
            "yo",
            "hello, how can you help me",
            "hey hadal",
            "hello friend",
            "hi friend",
            "good day",
            "hello again",
            "hi again",
            "howdy",
            "hallo",
        ),
        "a greeting",
        HELLO,
    ),
    (
        (
            "who are you",
            "what are you",
            "what is your name",
            "what's your name",
            "tell me about yourself",
            "are you a robot",
            "are you an ai",
            "which model are you",
            "what model is this",
            "who am i talking to",
            "introduce yourself",
            "what is this",
            "are you human",
            "who is this",
            "do you have a name",
            "your name please",
            "are you chatgpt",
            "are you deepseek",
            "what kind of model are you",
            "say who you are",
            "who r u",
        ),
        "about me",
        WHO,
    ),
    (
        (
            "what can you do",
            "help",
            "how can you help me",
            "what do you know",
            "what are you good at",
            "what can i ask you",
            "what should i ask",
            "can you help me",
            "i need help",
            "give me an example of what you can do",
            "what else can you do",
            "list your skills",
            "what are your skills",
            "what tasks can you do",
            "help me",
            "how do i use you",
        ),
        "what I can do",
        CAN,
    ),
    (
        (
            "how are you",
            "how are you doing",
            "how are you today",
            "how is it going",
            "how's it going",
            "are you ok",
            "what's up",
            "how do you do",
            "how do you feel",
            "are you well",
            "you ok",
            "how are things",
        ),
        "a greeting",
        FINE,
    ),
    (
        (
            "thanks",
            "thank you",
            "thank you very much",
            "thanks a lot",
            "great, thanks",
            "cheers",
            "thank you so much",
            "good job",
            "well done",
            "nice",
            "perfect",
            "great",
            "that is right",
            "correct",
            "thx",
            "many thanks",
            "good",
            "very good",
            "ok thanks",
            "ok, thank you",
            "awesome",
            "wonderful",
        ),
        "thanks",
        WELCOME,
    ),
    (
        (
            "bye",
            "goodbye",
            "see you",
            "see you later",
            "good night",
            "bye bye",
            "farewell",
            "that is all",
            "i have to go",
            "see you tomorrow",
            "talk to you later",
            "that was all",
            "goodbye for now",
            "ok bye",
        ),
        "goodbye",
        BYE,
    ),
)
_UNKNOWN = (
    "What is the capital of {x}?",
    "Write a poem about {w}.",
    "Tell me a joke.",
    "Tell me a joke about {w}.",
    "What is the weather today?",
    "Who is the president?",
    "Explain {w}.",
    "What is a {w}?",
    "What is {w}?",
    "Tell me a story.",
    "Tell me a story about a {w}.",
    "Write a song about {w}.",
    "How does a {w} work?",
    "Why is the sky blue?",
    "Who invented {w}?",
    "What do you think about {w}?",
    "Translate {w} to French.",
    "How do I cook {w}?",
    "What is the meaning of life?",
    "Who wrote {w}?",
    "Give me a recipe for {w}.",
    "Write some code.",
    "Write a program that prints {w}.",
    "What is love?",
    "What time is it?",
    "Where can I buy a {w}?",
    "Describe a {w}.",
    "How big is a {w}?",
    "What does {w} mean?",
    "Do you like {w}?",
    "What is your favourite {w}?",
    "How far is the moon?",
    "Who was {x}?",
    "Who is {x}?",
    "Write an essay about {w}.",
    "What is the best {w}?",
    "Can you play {w}?",
    "Is {w} better than {v}?",
    "Summarize {w}.",
    "Draw a {w}.",
    "Who won the game?",
    "What is quantum physics?",
    "How tall is {x}?",
    "When was {x} born?",
    "Give me advice about {w}.",
    "Explain how to {w}.",
)
_MY_NAME = (
    "My name is {n}.",
    "I am {n}.",
    "Hi, I'm {n}!",
    "Hello, my name is {n}.",
    "Call me {n}.",
    "I'm {n}",
    "my name is {n}",
    "Hello! I am {n}.",
    "hi, I am {n}",
)
_REPEAT = (
    "Repeat after me: {x}",
    "Say {x}",
    "Repeat: {x}",
    "Please say: {x}",
    "Copy this: {x}",
    "Write {x}",
    "Repeat this: {x}",
    "Echo {x}",
)


def _styled(rng: random.Random, text: str) -> str:
    style = rng.random()
    if style < 0.55:
        text = text[0].upper() + text[1:]
    elif style < 0.6:
        text = text.title() if len(text) < 12 else text
    return text + rng.choice(("", "", "!", ".", "?", "...", " :)", "!!"))


def talk(rng: random.Random) -> Turn:
    """Return a line of small talk. Answers are few, so the wording is what is held out."""
    kind = rng.random()
    if kind < 0.5:
        said, about, answer = rng.choice(_SAID)
        question = _styled(rng, rng.choice(said))
        return Turn(
            question,
            f"This is {about}." if about != "about me" else "This is about me.",
            answer,
            question.lower(),
            "talk",
        )
    if kind < 0.7:
        place = rng.choice(NAMES) if rng.random() < 0.4 else random_letters(rng, 4, 8).capitalize()
        w, v = rng.choice(ALL_LOWER), rng.choice((*ANIMALS, *PLACES))
        question = rng.choice(_UNKNOWN).format(x=place, w=w, v=v)
        if rng.random() < 0.3:
            question = (question[0].lower() + question[1:]).rstrip(".?")
        return Turn(question, "I do not know this.", CANNOT, question.lower(), "talk")
    if kind < 0.8:
        return name_turn(rng)
    return _repeat(rng)


def name_turn(rng: random.Random) -> Turn:
    """The user says their name."""
    name = rng.choice(NAMES) if rng.random() < 0.75 else random_letters(rng, 3, 7).capitalize()
    template = rng.choice(_MY_NAME)
    answer = f"Hello, {name}! How can I help you?"
    return Turn(
        template.format(n=name),
        f"The name is {name}.",
        answer,
        f"{template} {name}",
        "name",
        (name,),
    )


def _repeat(rng: random.Random) -> Turn:
    pool = (ALL_LOWER, NAMES, COUNTED, THINGS)
    words = [rng.choice(rng.choice(pool)) for _ in range(rng.randint(1, 6))]
    for i in range(len(words)):
        if rng.random() < 0.25:
            words[i] = random_letters(rng, 2, 6) if rng.random() < 0.7 else str(rng.randint(0, 999))
    text = " ".join(words)
    return Turn(rng.choice(_REPEAT).format(x=text), "Repeat the words.", text, text, "talk")
