# ruff: noqa: E501 - a frame is one line, however long.
"""Lists and the letters of a word: sorting, the largest and the smallest, reversing, counting,
spelling, naming the n-th.

Sorting is written as picking one item at a time with the rest copied, so each line needs only the
line above it; letters always begin with the word spelled.
"""

from evals.wordings import Source, asked, lines
from evals.words import ALL_LOWER, NAMES, Turn, join_list, random_letters

_UP_ENDS = (
    "[from smallest to largest|in ascending order|from low to high|from small to big"
    "|smallest first|lowest first|from lowest to highest|in increasing order"
    "|from the smallest to the biggest|in rising order|from least to greatest]"
)
_DOWN_ENDS = (
    "[from largest to smallest|in descending order|from high to low|from big to small"
    "|largest first|highest first|from highest to lowest|in decreasing order"
    "|from the biggest to the smallest|in falling order|from greatest to least|biggest first]"
)
_AZ_ENDS = (
    "[alphabetically|in alphabetical order|from A to Z|by the alphabet|in the order of the alphabet"
    "|from a to z|in ABC order]"
)
_ZA_ENDS = "[in reverse alphabetical order|from Z to A|backwards by the alphabet|from z to a]"


# Frames to sort, whatever the items and the direction: {e} is one of the ends above, {z} what the
# items are called.
_ORDERING = lines("""
    [sort|order|arrange|rank] {x} {e}
    [sort|order|arrange|rank|line up|organise|list] [these|these {z}|the {z}|the following {z}|my {z}|the list] {e}: {x}
    put {x} {e}
    put [these|these {z}|the {z}|the following|my {z}|this list] {e}: {x}
    [write|give me|show me|list|print|return|say|name|read out|tell me] {x} {e}
    [sort|arrange|order] the {z} {x} {e}
    [bring|get|place|set|lay out] [these {z}|the {z}|them|everything] {e}: {x}
    [take|look at|here are|here is a list] {x} and [sort|order|arrange] [it|them] {e}
    [rearrange|reorder|sort out|tidy up] {x} {e}
    [rearrange|reorder|sort out] [these|the {z}|the following {z}] {e}: {x}
    tidy up [the {z}|these] so that they go {e}: {x}
    go through {x} {e}
    make a list {e} [of|from|out of|with] {x}
""")
_BARE_ORDERING = lines("""
    {x} {e}
    {x} - [sort|sort these|order|sort them] {e}
    {x}: {e} please
    {e}: {x}
    sort {e}: {x}
    [I have|We have|Given|Here are|These are|Here is my list:|List:] {x}. [Sort|Order|Arrange|Put] them {e}.
    [I have|We have|Given|Here are|There are] the {z} {x}. [What is the order|How do they go|What order do they have] {e}?
    [How|In what order] do {x} go {e}?
    [Which|What] [order|sequence] do {x} have {e}?
    [My {z}|The {z}] are {x}. [Please sort|Sort|Order] them {e}.
    {x}. [Now|Please|Next] {e}.
    What [is|would be] {x} {e}?
    What does {x} look like {e}?
""")
_PLAIN_SORT = lines("""
    sort {x}
    sort: {x}
    sort this: {x}
    order {x}
    put {x} in order
    sort the list {x}
    [sort|order|arrange] [these|them|the following|this list|my list|it for me]: {x}
    {x} [in order|sorted|in the right order][, please| please|]
    {x} - sort these
    bring {x} into [order|the right order]
    [Could you|Can you|Please] sort [this|these|it|them][:|?] {x}
""")
_MAX = lines("""
    [What|Which] [is|number is] the [largest|biggest|greatest|highest|maximum]: {x}?
    [What|Which] [number |one |]is the [largest|biggest|greatest|highest] [of|among|in|out of] {x}?
    Which [number |one |]is [bigger|larger|greater|higher]: {x}?
    [Of|Among|Out of|From] {x}, [which|what] [one |number |]is the [largest|biggest|greatest|highest]?
    Which of {x} is [the largest|the biggest|the greatest|the highest]?
    [Here are|I have|Given|Look at] {x}. [Which|What] is the [largest|biggest|greatest|highest][ one|]?
    [Who|Which] wins if the [highest|biggest|largest] number wins: {x}?
    {x}: which is [biggest|largest|greatest|the highest]?
""")
_MAX_NOUNS = lines("""
    the [maximum|largest|biggest|greatest|highest|max] of {x}
    the [largest|biggest|greatest|highest] [number|value|one|figure] [of|in|among|from|out of] {x}
    the [largest|biggest|greatest|highest] [number|value|one]: {x}
    max of {x}
    the top [number|value] in {x}
""")
_MAX_ORDERS = lines("""
    [find|pick|choose|name|show me|give me|tell me|pick out] the [largest|biggest|greatest|highest] [number|one|of these|value]: {x}
    [find|pick|choose|name] the [largest|biggest|greatest|highest] [of|in|from|among] {x}
""")
_MIN = lines("""
    [What|Which] [is|number is] the [smallest|lowest|least|minimum]: {x}?
    [What|Which] [number |one |]is the [smallest|lowest|least] [of|among|in|out of] {x}?
    Which [number |one |]is [smaller|lower|less]: {x}?
    [Of|Among|Out of|From] {x}, [which|what] [one |number |]is the [smallest|lowest]?
    Which of {x} is [the smallest|the lowest|the least]?
    [Here are|I have|Given|Look at] {x}. [Which|What] is the [smallest|lowest][ one|]?
    [Who|Which] wins if the [lowest|smallest] number wins: {x}?
    {x}: which is [smallest|lowest|the least]?
""")
_MIN_NOUNS = lines("""
    the [minimum|smallest|lowest|least|min] of {x}
    the [smallest|lowest|least] [number|value|one|figure] [of|in|among|from|out of] {x}
    the [smallest|lowest] [number|value|one]: {x}
    min of {x}
    the bottom [number|value] in {x}
""")
_MIN_ORDERS = lines("""
    [find|pick|choose|name|show me|give me|tell me|pick out] the [smallest|lowest|least] [number|one|of these|value]: {x}
    [find|pick|choose|name] the [smallest|lowest] [of|in|from|among] {x}
""")
_REVERSE_LIST = lines("""
    reverse this list: {x}
    reverse the list {x}
    reverse {x}
    put [this list|these|the items] in reverse order: {x}
    [write|say|list|give me|read|show me|print|name] {x} [backwards|in reverse|in reverse order|from back to front|from last to first|from the end|from right to left]
    reverse the order of [these|this|the following|the items|the list]: {x}
    [list|say|write|name|give me] [these|them|the items|the following] in the opposite order: {x}
    turn [this list|the list|these|the order] [around|round]: {x}
    [flip|turn round|swap|invert] [this list|the list|the order|the sequence|the items][:| of] {x}
    [flip|invert|turn around|turn round] {x}
    [start|begin] [with|at|from] the last [item|one] and [list|go through|read] {x}
    [start|begin] [with|at|from] the [end|back] of {x}
    put the last [item|one|element] first and so on: {x}
    [list|name|say|give me] {x} [the other way round|the other way around|the wrong way round]
    read this list from [right to left|the end|back to front|bottom to top]: {x}
""")
_REVERSE_LIST_NOUNS = lines("""
    {x} [backwards|in reverse|reversed|in reverse order|from last to first|back to front]
    the [reverse|reversed list|opposite order|reversed order] of {x}
    the list {x} [backwards|reversed|in reverse]
    the order {x} turned [around|round]
    {x} [starting|beginning] [from|at|with] the [end|last one|last item]
    {x} from [back to front|the last to the first|end to start]
    the items {x} in [reverse|the opposite order|turned order]
""")
_REVERSE_LIST_QUESTIONS = lines("""
    What is {x} [backwards|in reverse order|in reverse|from last to first]?
    How does the list {x} [look|go|read] [backwards|in reverse|from the end]?
    The list is {x}. What is it [backwards|in reverse|from the end|reversed]?
    [I have|Here are|Given|Look at] {x}. [What is the opposite order|What is the reverse|Reverse them|Turn them round][?|]
    [Take|We have|Here is] {x}. [Turn|Put] them [round|around|in the opposite order].
    [Given|Look at] the list {x}. What is its [opposite|reverse] order?
""")
_REVERSE_SENTENCE = lines("""
    reverse the order of the words: {x}
    reverse the [words|word order|sentence]: {x}
    [write|say|list|give me|put] [these|the|the following] words in [reverse|the opposite|backward] order: {x}
    reverse the word order of: {x}
    [say|write|read] [this|the sentence|this sentence] [word by word from the end|with its words backwards|with the words in reverse]: {x}
    put the last word first and so on: {x}
    turn the [words|word order] [around|round]: {x}
""")


def reason_sort(items: list[str], ordered: list[str]) -> str:
    """Pick the next item, copy the rest, always from the line above. All items have a space before
    them: one at the start of a line is another token. Numbers are written with three
    digits, words show their first letters' places in the alphabet before: neither asks what the
    other items are.
    """
    lines = []
    if items[0].isdigit():
        ordered, items = _three_digits(ordered), _three_digits(items)
    else:
        places = [" ".join(map(_place, word[:3].lower())) for word in items]
        lines.append(", ".join(f"{w} {p}" for w, p in zip(items, places, strict=True)))
    rest = list(items)
    lines.append(f"| {' '.join(rest)}")
    for item in ordered[:-1]:
        rest.remove(item)
        lines.append(f"- {item} | {' '.join(rest)}")
    return "\n".join([*lines, f"- {ordered[-1]}"])


def _three_digits(numbers: list[str]) -> list[str]:
    return [number.zfill(3) for number in numbers]


def _place(letter: str) -> str:
    return f"{letter}{ord(letter) - 96:02}" if "a" <= letter <= "z" else letter


def reason_reverse(items: list[str]) -> str:
    """Number the items forwards, then copy them backwards."""
    numbered = [f"{i} {item}" for i, item in enumerate(items, 1)]
    return f"order: {' '.join(numbered)}\n{' '.join(reversed(numbered))}"


def _numbers(source: Source) -> list[str]:
    top = source.choice((9, 20, 99, 99, 99, 999))
    size = source.choice((2, 3, 3) if top == 999 else (2, 3, 3, 3, 4, 4, 5))
    picked = [source.randint(0, top) for _ in range(size)]
    if source.chance(0.93):
        picked = source.sample(range(top + 1), size)
    return [str(value) for value in picked]


def sort(source: Source) -> Turn:
    """Return a list to sort, or to find the largest or the smallest of."""
    if source.chance(0.07):
        return _first_word(source)
    words_asked = source.chance(0.4)
    down = source.chance(0.15 if words_asked else 0.38)
    plain = not down and source.chance(0.3)
    if words_asked:
        words = _words(source)
        ordered = sorted(words, key=str.lower, reverse=down)
        what = source.choice(("words", "words", "names", "items"))
        ends = _ZA_ENDS if down else _AZ_ENDS
        return _sorted_turn(source, plain, (ends, what), words, ordered, down)
    items = _numbers(source)
    ordered = sorted(items, key=int, reverse=down)
    if source.chance(0.2):
        best, seen = items[0], [items[0]]
        for item in items[1:]:
            best = max(best, item, key=int) if down else min(best, item, key=int)
            seen.append(best)
        said = asked(
            source,
            questions=_MAX if down else _MIN,
            nouns=_MAX_NOUNS if down else _MIN_NOUNS,
            orders=_MAX_ORDERS if down else _MIN_ORDERS,
        )
        question = said.format(x=join_list(source, items, "or" if "bigger" in said else "and"))
        # First all numbers, then the best so far at each of them.
        given, best_so_far = (" ".join(_three_digits(each)) for each in (items, seen))
        reasoning = f"number {'highest' if down else 'lowest'}: {given}\n{best_so_far}"
        return Turn(question, reasoning, best, f"best{down} {items}", "number", (best,))
    ends = _DOWN_ENDS if down else _UP_ENDS
    what = source.choice(("numbers", "numbers", "values", "figures", "scores"))
    return _sorted_turn(source, plain, (ends, what), items, ordered, down)


_FIRST_WORD = lines("""
    [Which|What] [word |name |one |]comes {e} [in the alphabet|alphabetically|in alphabetical order|in a dictionary|in the dictionary]: {x}?
    [Which|What] [of|out of|among] {x} comes {e} [in the alphabet|alphabetically|in alphabetical order]?
    [Alphabetically|In the alphabet|In alphabetical order|In a dictionary], [which|what] [comes|is] {e}: {x}?
    [Which|What] is [alphabetically|in alphabetical order] {e}, {x}?
    If I sort {x} [by the alphabet|alphabetically], which [word |one |]is {e}?
    [Which|What] would be {e} in a [dictionary|phone book]: {x}?
""")
_FIRST_WORD_NOUNS = lines("""
    the word that comes {e} [alphabetically|in the alphabet] [of|among] {x}
    the alphabetically {e} [word |one |item |]of {x}
    the {e} [word|one] in alphabetical order: {x}
    the {e} one [alphabetically|by the alphabet] [of|from|in] {x}
""")


def _first_word(source: Source) -> Turn:
    """The first or the last of some words by the alphabet."""
    words = _words(source)
    ordered = sorted(words, key=str.lower)
    at_end = source.chance(0.35)
    best = ordered[-1 if at_end else 0]
    said = asked(source, questions=_FIRST_WORD, nouns=_FIRST_WORD_NOUNS)
    question = said.format(e="last" if at_end else "first", x=join_list(source, words, "or"))
    reasoning = f"sort {'last' if at_end else 'first'}: {reason_sort(words, ordered)}"
    return Turn(question, reasoning, best, f"first{at_end} {words}", "words", (best,))


def _words(source: Source) -> list[str]:
    size = source.choice((2, 2, 3, 3, 3, 4))
    style = source.random()
    if style < 0.75:
        return source.sample(ALL_LOWER, size)
    if style < 0.9:
        return source.sample(NAMES, size)
    words: dict[str, None] = {}
    while len(words) < size:
        words[random_letters(source, 3, 7)] = None
    return list(words)


def _sorted_turn(
    source: Source,
    is_plain: bool,
    said_of: tuple[str, str],
    items: list[str],
    ordered: list[str],
    down: bool,
) -> Turn:
    ends, what = said_of
    is_az = ends is _AZ_ENDS and source.chance(0.12)
    if is_plain:
        said = asked(source, orders=_PLAIN_SORT)
    elif is_az:
        said = asked(source, orders=_ALPHABETIZE)
    else:
        said = asked(source, orders=_ORDERING, questions=_BARE_ORDERING)
    question = said.format(x=join_list(source, items), e=source.spelled(ends), z=what)
    reasoning = f"sort {'down' if down else 'up'}: {reason_sort(items, ordered)}"
    key = f"sort{down} {items}"
    return Turn(question, reasoning, ", ".join(ordered), key, "list", tuple(ordered))


_ALPHABETIZE = lines("""
    [alphabetize|alphabetise] {x}
    [alphabetize|alphabetise] [these|these {z}|the list|my {z}]: {x}
    [alphabetize|alphabetise] the {z} {x}
    [alphabetize|alphabetise] this [list|row|set]: {x}
""")


def reverse_list(source: Source) -> Turn:
    """Return a list or a row of words to turn round."""
    size = source.randint(2, 5)
    style = source.random()
    if style < 0.35:
        items = [str(source.randint(0, 99)) for _ in range(size)]
    elif style < 0.8:
        items = source.sample(ALL_LOWER, size)
    elif style < 0.9:
        items = source.sample("abcdefghijklmnopqrstuvwxyz", size)
    else:
        items = [random_letters(source, 2, 5) for _ in range(source.randint(2, 4))]
    backwards = items[::-1]
    if style >= 0.35 and source.chance(0.25):
        question = asked(source, orders=_REVERSE_SENTENCE).format(x=" ".join(items))
        answer = " ".join(backwards)
    else:
        said = asked(
            source,
            orders=_REVERSE_LIST,
            nouns=_REVERSE_LIST_NOUNS,
            questions=_REVERSE_LIST_QUESTIONS,
        )
        question, answer = said.format(x=join_list(source, items)), ", ".join(backwards)
    reasoning = reason_reverse(items)
    return Turn(question, reasoning, answer, f"reverse {items}", "list", tuple(backwards))


# Letters of a word.

_REVERSE = lines("""
    reverse [the word |the letters of |the string |the letters in |the text |]{w}
    reverse: {w}
    [write|spell|say|type|print|read|show me|give me|put|write out|type out] [the word |]{w} [backwards|in reverse|from back to front|from the end|from right to left|backward|the other way round|the wrong way round|from end to start|from last to first letter]
    turn [the word |the letters of |]{w} [around|round|backwards]
    [flip|mirror|invert|flip round|turn back to front] [the word |the letters of |the string |]{w}
    [write|spell|type|give me|print|show me] the letters of {w} [backwards|in reverse|in reverse order|in the opposite order|from the last to the first|from right to left|back to front]
    [start|begin] [with|at|from] the [last letter|end] of {w} and [spell|write|go] [it |]back
    [make|form] a [new word|word|string] [by reading|from] {w} [backwards|in reverse|from the end]
    [hold|put] {w} [in front of|up to] a mirror and read it
    [run|go] through {w} from [the end to the start|the last letter to the first]
    change {w} so that [it reads backwards|the last letter comes first]
    put the letters of {w} in [reverse|the opposite|backward] order
    swap the letters of {w} end for end
    [run|walk|go] [back|backwards] through [the letters of |]{w}
    [say|write|print] {w} the [other|wrong] way [round|around]
""")
_REVERSE_NOUNS = lines("""
    {w} [backwards|reversed|in reverse|spelled backwards|back to front|from right to left|mirrored|in mirror writing]
    the [reverse|mirror image|reversed form|backward spelling|backwards form] of {w}
    the word {w} [backwards|reversed|in reverse|spelled from the end|with its letters turned round]
    the letters of {w} [backwards|in reverse order|from last to first]
    what {w} is [backwards|in reverse|reversed]
    the word {w} in [mirror image|backward spelling|reversed form]
    the [backward|backwards|mirrored] [form|version|spelling] of {w}
""")
_REVERSE_QUESTIONS = lines("""
    What is {w} [backwards|reversed|in reverse|spelled backwards|from right to left]?
    How do you [write|spell|say|type] {w} [in reverse|backwards|from the end|the other way round]?
    How does {w} [read|look|sound] [backwards|in reverse|from right to left|from the end|in a mirror]?
    What do [you get|I get] if [you|I] [reverse|flip|turn round|mirror] {w}?
    What [word|text|string] [comes out|results|do I get] if {w} is [reversed|flipped|turned round|read backwards]?
    If [you|I|we] [read|write|spell] {w} [backwards|from the end|from right to left], what [is it|do you get|comes out|does it say]?
    [Take|Look at|Here is|My word is] the word {w}. [What is it backwards|Reverse it|How is it in reverse|Turn it round][?|]
""")
_COUNT = lines("""
    How many {c} in {w}?
    How many {c}s are [in|there in|contained in|inside] [the word |]{w}?
    How many times does [the letter |]{c} [appear|occur|come up|show up|turn up] in [the word |]{w}?
    How many letters {c} are [there |]in {w}?
    How many times is [the letter |there a |]{c} in [the word |]{w}?
    How often [does|do I see|is] [the letter |]{c} [occur |appear |]in [the word |]{w}?
    How many {c}'s are [there |]in [the word |]{w}?
    How many {c}'s [in|does it take to write|are needed for] {w}?
    In [the word |]{w}, how [many times|often] is there [a|the letter] {c}?
    How many {c} does [the word |]{w} [have|contain|hold]?
    [Look at|Take|Here is|Consider|My word is] [the word |]{w}. How many {c}['s|] [does it have|are in it|do you see|can you find|are there]?
    {w}: how many {c}?
    {w} - how [many|often] {c}?
    How many of the letters in {w} are {c}?
    How many of the letter {c} [are|do you find|can be found] in {w}?
    If I [spell|write] {w}, how many {c}['s|] do I [need|write|use]?
    Does {w} have one {c} or more? How many?
    How many letters in {w} are {c}?
    Are there letters {c} in {w}, and how many?
    I see [the letter|letters] {c} in {w}. How many [are there|are they]?
    How many of the letters are {c} in the word {w}?
""")
_COUNT_NOUNS = lines("""
    the number of {c}['s|s|] in [the word |]{w}
    the number of times {c} [is|appears|occurs|comes up] in {w}
    how many {c}'s [there are|you find|I can find|one finds] in [the word |]{w}
    how often [the letter |]{c} [occurs|appears|is|comes] in [the word |]{w}
    the count of [the letter |]{c} in {w}
    the amount of {c}['s|] in {w}
    how many times [the letter |]{c} [occurs|is used|appears] in {w}
    how often one [finds|sees|meets] {c} in {w}
    how many letters {c} {w} has
    the number of letters {c} [in|of] {w}
    how many letters of {w} are {c}
""")
_COUNT_ORDERS = lines("""
    count the {c}s in {w}
    count the {c}'s in {w}
    count the letter {c} in {w}
    count {c} in {w}
    count [all|every|each] {c} in [the word |]{w}
    count how [many times|often] {c} [is|appears|comes up|occurs] in {w}
    check how many {c}['s|s|] [are in|there are in] {w}
    [go|look] through {w} and count [the letter |every |each ]{c}
    spell {w} and count the {c}'s
    [tell|show] me how [often|many times] {c} [comes up|appears|occurs] in {w}
    [see|find out|say] how [often|many times] [the letter |]{c} is in {w}
    [count|find|add up] the letters {c} [of|in] {w}
    count how many letters {c} [the word |]{w} has
""")
_LENGTH = lines("""
    How many letters [are in|are there in|has|make up|does it take to write] [the word |]{w}?
    How many [letters|characters] does [the word |]{w} have?
    How long is [the word |]{w}?
    What is the length of [the word |]{w}?
    [Look at|Take|Here is|My word is] {w}. How many letters [does it have|are in it|is that]?
    Of how many [letters|characters] is {w} made?
    {w} has how many [letters|characters]?
    How many [letters|characters] do I [type|need|write] for {w}?
    How many letters long is {w}?
""")
_LENGTH_NOUNS = lines("""
    the [length|number of letters|letter count|size|number of characters] of [the word |]{w}
    the number of [letters|characters] in [the word |]{w}
    how [long|many letters] [the word |]{w} [is|has]
    how many letters {w} has
    how long [the word |]{w} is
""")
_LENGTH_ORDERS = lines("""
    count the [letters|characters] [in|of] [the word |]{w}
    count all letters of {w}
    measure the length of [the word |]{w} in letters
""")
_SPELL = lines("""
    spell {w}
    spell the word {w}
    spell out [the word |]{w}
    spell {w} letter by letter
    [write|say|give me|list|name] {w} letter by letter
    [list|name|say|give me] [all |]the letters of [the word |]{w} one by one
    [split|break|cut|take apart] [the word |]{w} into [letters|its letters|single letters]
    separate the letters of {w} with dashes
    put a dash between the letters of {w}
    [cut|break|split|take] [the word |]{w} [apart|up] letter by letter
    [write|print|spell] {w} with [dashes|a dash] between the letters
    turn {w} into [single letters|a row of its letters]
    [split|separate|cut] {w} at each letter
""")
_SPELL_QUESTIONS = lines("""
    How do you spell [the word |]{w}?
    How is {w} [spelled|spelt|written, letter by letter]?
    What are the letters of [the word |]{w}?
    What is the spelling of {w}?
    What does the spelling of {w} look like?
    How does one spell {w}?
""")
_VOWELS = lines("""
    How many vowels [are|are there] in [the word |]{w}?
    How many vowels does [the word |]{w} [have|contain]?
    How many of the letters [of|in] {w} are vowels?
    {w}: how many vowels?
    How many vowels [has|are needed for] {w}?
    How many vowels are needed to write {w}?
    {w} has how many vowels?
    [Look at|Take|Here is] {w}. How many vowels [does it have|are in it]?
""")
_VOWELS_NOUNS = lines("""
    the number of vowels in [the word |]{w}
    how many vowels {w} has
    the vowel count of {w}
    how many vowels there are in {w}
""")
_VOWELS_ORDERS = lines("""
    count the vowels [in|of] [the word |]{w}
    find all vowels in {w} and count them
""")
_NTH = lines("""
    What is the {n} letter [of|in] [the word |]{w}?
    Which letter is the {n} [one |]in [the word |]{w}?
    Which is the {n} letter [of|in] [the word |]{w}?
    Which letter [stands|comes|is] {n} in [the word |]{w}?
    In [the word |]{w}, [what|which letter] is {n}?
    What [letter|character] [does {w} have|is] in {n} place[ in {w}|]?
    [Look at|Take|Here is] {w}. What is the {n} letter?
    {w}: what is the {n} letter?
""")
_NTH_NOUNS = lines("""
    the {n} letter [of|in] [the word |]{w}
    the {n} character [of|in] {w}
    the letter that comes {n} in {w}
    {w}'s {n} letter
""")
_FIRST_LETTER = lines("""
    What does [the word |]{w} [start|begin] with?
    Which letter does [the word |]{w} [start|begin] with?
    With [which|what] letter does {w} [start|begin]?
    What letter is at the [start|beginning|front] of {w}?
    What is the [starting|opening|initial|beginning] letter of {w}?
""")
_LAST_LETTER = lines("""
    What does [the word |]{w} [end|finish] [with|in]?
    Which letter does [the word |]{w} end [with|in|on]?
    With [which|what] letter does {w} [end|finish|stop]?
    What letter is at the [end|back] of {w}?
    What is the [ending|final|closing] letter of {w}?
""")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "last")
_SHORT_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "last")


def a_word(source: Source, high: int = 9) -> str:
    """Return a word to spell: mostly a plain one, often made-up letters."""
    kind = source.random()
    if kind < 0.55:
        return source.choice(ALL_LOWER)
    if kind > 0.96:
        word = source.choice((*ALL_LOWER, random_letters(source, 2, high)))
        return word.upper() if source.chance(0.5) else word.capitalize()
    return source.choice(NAMES).lower() if kind < 0.62 else random_letters(source, 2, high)


def _quote(source: Source, word: str) -> str:
    style = source.random()
    if style < 0.66:
        return word
    return f'"{word}"' if style < 0.84 else f"'{word}'"


def reason_count(word: str, wanted: str, said: str = "") -> str:
    """Say what is wanted, then spell the word with a running count behind each such letter."""
    return f"count {said or wanted}: {_counted(word, wanted)}"


def reason_length(word: str) -> str:
    """Spell the word with a number behind every letter."""
    return f"count letters: {_counted(word, word)}"


def _counted(word: str, wanted: str) -> str:
    parts, count = [], 0
    for letter in word:
        parts.append(letter)
        if letter in wanted:
            count += 1
            parts.append(str(count))
    return " ".join(parts)


def reason_reverse_word(word: str) -> str:
    """Spell the word, then spell it backwards."""
    return f"reverse: {' '.join(word)}\n{' '.join(word[::-1])}"


def reverse(source: Source) -> Turn:
    """Return a word or a list to turn round."""
    if source.chance(0.4):
        return reverse_list(source)
    word = a_word(source)
    said = asked(source, orders=_REVERSE, nouns=_REVERSE_NOUNS, questions=_REVERSE_QUESTIONS)
    question = said.format(w=_quote(source, word))
    back = word[::-1]
    return Turn(question, reason_reverse_word(word), back, f"reverse {word}", "word", (back,))


def letters(source: Source) -> Turn:
    """Return a question about the letters of a word; most ask how often one letter is in it."""
    word = a_word(source, 10)
    shown = _quote(source, word)
    kind = source.choices(("count", "length", "spell", "vowels", "nth"), (50, 14, 9, 9, 16))[0]
    if kind == "count":
        return count_turn(source, word, shown)
    n = ""
    if kind == "length":
        answer, reasoning = str(len(word)), reason_length(word)
        said = asked(source, questions=_LENGTH, nouns=_LENGTH_NOUNS, orders=_LENGTH_ORDERS)
    elif kind == "spell":
        answer, reasoning = "-".join(word), f"word: {' '.join(word)}"
        said = asked(source, questions=_SPELL_QUESTIONS, orders=_SPELL)
    elif kind == "vowels":
        reasoning = reason_count(word, "aeiouAEIOU", "aeiou")
        answer = str(sum(letter in "aeiouAEIOU" for letter in word))
        said = asked(source, questions=_VOWELS, nouns=_VOWELS_NOUNS, orders=_VOWELS_ORDERS)
    else:
        place = source.choice([i for i in range(7) if i < len(word) or i == 6])
        answer = word[-1] if place == 6 else word[place]
        reasoning = f"letter {'last' if place == 6 else place + 1}: {_counted(word, word)}"
        n = (_SHORT_ORDINALS if source.chance(0.2) else _ORDINALS)[place]
        if place in (0, 6) and source.chance(0.5):
            said = asked(source, questions=_LAST_LETTER if place else _FIRST_LETTER)
        else:
            said = asked(source, questions=_NTH, nouns=_NTH_NOUNS)
        kind = f"nth{place}"
    question = said.format(w=shown, n=n)
    return Turn(question, reasoning, answer, f"{kind} {word}", "letters", (word,))


def count_turn(source: Source, word: str, shown: str) -> Turn:
    """Return `how many c in word`; one in seven asks for a letter that need not be there."""
    word = word.lower()  # "How many r in Rare?" would have two answers.
    shown = shown.lower()
    letter = (
        source.choice(word) if source.chance(0.85) else source.choice("abcdefghijklmnopqrstuvwxyz")
    )
    mark = source.choice((f'"{letter}"', f"'{letter}'")) if source.chance(0.12) else letter
    said = asked(source, questions=_COUNT, nouns=_COUNT_NOUNS, orders=_COUNT_ORDERS)
    question = said.format(c=mark, w=shown)
    reasoning = reason_count(word, letter)
    return Turn(
        question, reasoning, str(word.count(letter)), f"count {letter} {word}", "count", (word,)
    )
