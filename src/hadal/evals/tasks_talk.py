"""Small talk: greetings, who the model is, saying something after the user, and what it cannot
do.
"""

import random

from hadal.evals.tasks_turn import Turn, random_letters
from hadal.evals.tasks_words import ALL_LOWER, ANIMALS, COUNTED, NAMES, PLACES, THINGS

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
