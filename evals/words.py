"""What the tasks are made of: words, and a question with its written-out reasoning and its answer.

Every word of these lists becomes one token of the model that ships, so its spelling is learned; any
other word is read letter by letter. Knows nothing of any particular task.
"""

import random
import re
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam"
    " Tom Vera Will Zoe Adam Bella Carl Dora Eric Fiona George Hana Ivan Julia Karl Lucy Max Nina"
    " Oscar Petra Ruth Simon Tina Victor Wanda Yuki Alice Bob Mary John Peter Lisa Mark Sara Ali"
    " Chen Diego Eva Omar Priya Mia Liam"
)

PLACES = _words(
    "kitchen garden park school library office garage market station museum bedroom bathroom cafe"
    " hotel airport bank beach forest church theatre hospital bakery cellar attic harbour stable"
    " zoo gym castle shop"
)

THINGS = _words(
    "ball book key lamp coin cup hat bag box pen ring clock phone map knife spoon plate chair"
    " mirror ticket letter candle kite drum camera basket bottle brush pillow shirt rope stone"
    " flute violin umbrella ladder"
)

COUNTED = _words(
    "apples pears plums lemons eggs nuts coins books pens cards stamps shells marbles stickers"
    " cookies candles flowers balloons buttons tickets oranges carrots potatoes peaches cherries"
    " pencils"
)

COLOURS = _words("red blue green yellow black white brown pink orange purple grey")

ANIMALS = _words(
    "cat dog horse cow goat sheep mouse rabbit fox bear wolf lion tiger monkey duck goose eagle owl"
    " frog snake whale shark camel zebra donkey turtle parrot pigeon hamster elephant giraffe"
    " penguin dolphin octopus"
)

CITIES = _words(
    "Paris London Rome Berlin Madrid Oslo Vienna Prague Lisbon Dublin Athens Warsaw Cairo Tokyo"
    " Delhi Lima Toronto Boston Chicago Sydney Bern Milan Geneva Moscow Seoul Hanoi Nairobi Havana"
)

JOBS = _words(
    "teacher doctor nurse farmer baker driver pilot sailor soldier cook painter writer singer"
    " lawyer waiter clerk judge tailor plumber engineer carpenter gardener butcher dentist reporter"
)

FOODS = _words(
    "bread butter cheese honey soup cake pizza salad rice fish pasta tea coffee milk juice"
    " chocolate jam toast yoghurt sausages pancakes"
)

PLAIN = _words(
    "apple banana cherry grape lemon mango melon orange peach pear plum strawberry raspberry"
    " blueberry tomato potato carrot onion pepper garlic bread butter cheese honey sugar salt rice"
    " soup cake cookie chocolate coffee tea water milk juice table window door house roof wall"
    " floor street bridge river lake mountain valley island ocean desert cloud rain snow storm wind"
    " summer winter spring autumn morning evening night moon sun star planet earth fire ice metal"
    " gold silver iron wood glass paper pencil computer keyboard screen music guitar piano trumpet"
    " song dance story poem number letter word question answer teacher student doctor nurse farmer"
    " baker driver pilot sailor soldier king queen prince knight mother father brother sister uncle"
    " aunt friend child baby family village city country world train plane boat ship car truck"
    " bicycle engine wheel road tower flag crown sword shield arrow hammer nail needle thread"
    " button pocket shoe glove scarf coat dress belt jewel bell whistle puzzle game card dice doll"
    " robot rocket magnet mirror happy sad angry calm brave clever gentle quick slow loud quiet"
    " bright dark heavy light soft hard sweet bitter sour warm cold young old tall short long wide"
    " narrow deep empty full open close begin end run walk jump swim climb throw catch push pull"
    " build break write read sing draw paint cook bake parallel committee balloon coffee address"
    " success possess mississippi bookkeeper tennessee alphabet letter hello level radar kayak noon"
    " civic banana cabbage rabbit puppy kitten ladder bubble pebble library language mathematics"
    " science history geography university knowledge elephant butterfly dragonfly umbrella"
    " telephone television newspaper calendar holiday birthday present surprise adventure treasure"
    " diamond emerald crystal pyramid volcano hurricane thunder lightning rainbow sunset horizon"
    " shadow candle"
)

ALL_LOWER = tuple(sorted(set(PLAIN) | set(ANIMALS) | set(THINGS) | set(COLOURS) | set(PLACES)))

MONTHS = _words(
    "January February March April May June July August September October November December"
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


_LISTED = frozenset(
    word.lower()
    for words in (ALL_LOWER, NAMES, COUNTED, CITIES, JOBS, FOODS, MONTHS, WEEKDAYS)
    for word in words
)
_PIECE = re.compile(r"[^\W\d_]+|\n+|\S")


def num_pieces(text: str) -> float:
    """About how many tokens a text makes, within a tenth: one for a digit, a sign or a word of these
    lists, one and a half for any other word, as most are known and some are spelled, and one for a
    byte of other scripts.
    """
    return sum(_size(piece) for piece in _PIECE.findall(text))


def _size(piece: str) -> float:
    if not piece.isascii():
        return len(piece.encode())
    return 1 if len(piece) < 3 or piece.lower() in _LISTED else 1.5


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's question and what the model should think and answer.

    `key` is the content that must not be seen in training when the turn is held out: the operands,
    the list, the text; not the wording. It is the same whichever task asks it, and of several
    contents each has a line. `subject` is what a later turn may refer to ("now sort it the other
    way").
    """

    question: str
    reasoning: str
    answer: str
    key: str
    kind: str = ""
    subject: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """What the model should call instead of answering."""
    before: tuple[dict[str, Any], ...] = ()
    """Calls and their results between the question and what is due now."""
    forced: str = ""
    """"any", or a tool's name: the reply has to begin with a call (`tool_choice`)."""
    schema: dict[str, Any] | None = None
    """What the answer, a JSON object, must follow (`response_format`)."""


_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|8|1[18]\b)")


def with_articles(text: str) -> str:
    """The text with "an" where "a" was written before a vowel, an 8, an 11 or an 18."""
    return _ARTICLE.sub(r"\1n ", text)


def join_list(rng: random.Random, items: list[str], word: str = "and") -> str:
    """Write a list the way users do: commas, commas and `and`, or bare spaces."""
    style = rng.random()
    if style < 0.5:
        return ", ".join(items)
    if style < 0.6:
        return " ".join(items)
    if style < 0.86:
        comma = "," if len(items) > 2 and rng.random() < 0.3 else ""
        return ", ".join(items[:-1]) + f"{comma} {word} {items[-1]}"
    if style < 0.9:
        return ",".join(items)
    if style < 0.94:
        return "[" + ", ".join(items) + "]"
    return (" - ", "; ", " / ", "\n")[rng.randrange(4)].join(items)


_SMALL_WORDS = _words(
    "the The a of in was is and to It A given got handed sent lent passed sold brought received"
    " borrowed bought belongs owned called named years old lives works born comes moved visited"
    " price costs pay dollars euros pounds home house room favourite likes loves eats friend owner"
    " rained snowed day evening week weather good bad late Later Today Yesterday Then There"
    " starts begins clock table row use exact check value result find show convert units from than"
)
"""Of texts and names, that are otherwise seldom or never part of a reply."""


def jumble(rng: random.Random, size: int) -> str:
    """So many words that mean nothing, of few different ones: whoever copies them has to know where
    they are in the text, not what comes next in other texts.
    """
    words = rng.sample((*ALL_LOWER, *NAMES, *COUNTED, *THINGS), 2 + size // 2)
    words += rng.sample(_SMALL_WORDS, rng.randint(1, 3))
    for i in range(len(words)):
        if rng.random() < 0.2:
            made_up = rng.random() < 0.7
            words[i] = random_letters(rng, 2, 6) if made_up else str(rng.randint(0, 999))
    return " ".join(rng.choice(words) for _ in range(size))


def random_letters(rng: random.Random, low: int, high: int) -> str:
    """Return a made-up word; every other letter is often a vowel so that some read like words."""
    size = rng.randint(low, high)
    if rng.random() < 0.5:
        return "".join(rng.choice("aeiou" if i % 2 else "bcdfghjklmnprstvwz") for i in range(size))
    pool = (
        "abcdefghijklmnopqrstuvwxyz"
        if rng.random() < 0.6
        else rng.sample("abcdefghijklmnopqrstuvwxyz", 4)
    )
    return "".join(rng.choice(pool) for _ in range(size))
