# ruff: noqa: E501 - a frame is one line, however long.
"""Reckoning: whole numbers, column by column with written carries, and days after or before a date.

Each line of the reasoning is one column: the sum, then the digits written so far. A year is an
ordinary one unless it is named.
"""

import re

from evals.wordings import Source, asked, lines
from evals.words import COUNTED, MONTH_DAYS, MONTHS, NAMES, WEEKDAYS, Turn

_SIGNS = {
    "+": lines("""
        {a} + {b}
        {a}+{b}
        {a} +{b}
        {a} [plus|and|added to|together with] {b}
    """),
    "-": lines("""
        {a} - {b}
        {a}-{b}
        {a} -{b}
        {a} [minus|less|take away] {b}
    """),
    "*": lines("""
        {a} * {b}
        {a}*{b}
        {a} x {b}
        {a}x{b}
        {a} [times|multiplied by] {b}
    """),
    "/": lines("""
        {a} / {b}
        {a}/{b}
        {a} : {b}
        {a} [divided by|over|shared by|split by] {b}
    """),
}
_BARE = {
    sign: lines(f"""
        {{a}} {sign} {{b}} =
        {{a}}{sign}{{b}}=
        {{a}}{sign}{{b}}=?
        {{a}} {sign} {{b}} = ?
        [Solve|Calculate|Compute|Sum|Result|Reckon|Maths|Math]: {{a}} {sign} {{b}}
        [Solve|Calculate|Compute|Reckon|Evaluate] {{a}} {sign} {{b}}
        [how much is|what's|whats|what is|how much does it make:] {{a}}{sign}{{b}}
        {{a}} {sign} {{b}} [makes what|equals|is|gives what|equals what|is what|makes][?|]
        If x = {{a}} {sign} {{b}}, what is x?
        {{a}}{sign}{{b}} [pls|please|thx|quick|asap]
        [hey|hi|yo|ok] {{a}}{sign}{{b}}
        x = {{a}} {sign} {{b}}. [x?|Find x.|What is x?]
    """)
    for sign in "+-*/"
}
_NOUNS = {
    "+": lines("""
        the [sum|total] of {a} and {b}
        {a} and {b} [together|combined|in total|altogether|in all|summed up|summed|added up|added together]
        the [result|answer|outcome] of [adding {b} to {a}|adding {a} and {b}|{a} plus {b}]
        the [result|number] [when|if] {b} is added to {a}
        the number that is {b} [more|larger|greater|bigger|higher] than {a}
        {b} more than {a}
        the value of {a} [plus|added to] {b}
        {a} [increased|raised] by {b}
        [both numbers|the two numbers] together, {a} and {b}
        the [combined|total|overall|joint] [amount|number|value|count] of {a} and {b}
        the [addition|sum] {a} + {b}
        my total [if I have|with|for] {a} and {b}
        {a} with {b} [added|on top|more|added to it]
        the grand total for {a} and {b}
    """),
    "-": lines("""
        the difference [between|of] {a} and {b}
        the difference [that|which] {a} and {b} have
        the difference [from {b} to {a}|if {b} is taken from {a}]
        {a} [decreased|reduced|lowered|diminished|cut] by {b}
        the [result|answer|outcome] of [subtracting {b} from {a}|taking {b} from {a}|{a} minus {b}]
        the number that is {b} [less|smaller|lower|fewer] than {a}
        {b} [less|fewer] than {a}
        [what remains|what is left|the rest|the remainder|what's left over] when {b} is taken [from|away from|off] {a}
        {a} without {b}
        the [gap|distance] between {a} and {b}
        how much [larger|bigger|greater|more] {a} is than {b}
        how much [smaller|less|lower] {b} is than {a}
        {a} with {b} [taken away|removed|subtracted|taken off|gone|deducted]
        the [subtraction|difference] {a} - {b}
        what is left of {a} after [losing|removing|spending|giving away|deducting] {b}
        the amount by which {a} exceeds {b}
        the [value|number] {a} [lowered|reduced|cut|diminished|decreased] by {b}
        what [you get|I get|is left] when {a} is [lowered|reduced|decreased|diminished|cut] by {b}
        the [result|answer|outcome] when {b} is [subtracted|taken] from {a}
        {a}, but {b} [less|smaller|lower]
    """),
    "*": lines("""
        the product of {a} and {b}
        the [result|answer|outcome] of [multiplying {a} by {b}|multiplying {a} and {b}|{a} times {b}]
        {a} [groups|lots|sets|times|packs|rows|piles] of {b}
        {a} taken {b} times
        the [multiplication|product] {a} x {b}
        the number [you get|I get|we get] when {a} is multiplied by {b}
        {a} [each|apiece] for {b} people, in total
        the value of {a} multiplied by {b}
        {b} times as [much|many] as {a}
        the total of {a} rows [with|of] {b} each
        {a} times the number {b}
        the number in {a} [packs|piles|lots|groups|sets|rows] of {b}
        {a} [packs|piles|groups|sets] with {b} in each
    """),
    "/": lines("""
        the quotient of {a} and {b}
        the [result|answer|outcome] of dividing {a} by {b}
        {a} [split|shared|divided] [evenly |equally |fairly |][among|between|by] {b}
        the division {a} / {b}
        how often {b} [fits|goes] into {a}
        {a} [divided|split|cut] into {b} equal parts
    """),
}
_ORDERS = {
    "+": lines("""
        add {a} and {b}
        add {b} to {a}
        add {a} to {b}
        add up {a} and {b}
        [sum|total|sum up|tot up] {a} and {b}
        put {a} and {b} together
        [add|combine] the numbers {a} and {b}
        add [these two numbers|both numbers|the following|these]: {a} and {b}
        [increase|raise] {a} by {b}
        [compute|calculate|work out|find|reckon|do] {a} plus {b}
        take {a} and add {b}[ to it|]
        start [with|at|from] {a} and [add|go up] {b}
        count {b} on from {a}
        [do|solve] the sum {a} + {b}
        join {a} and {b} into one number by adding
    """),
    "-": lines("""
        subtract {b} from {a}
        take {b} [away |]from {a}
        [take|knock|cut] {b} off {a}
        [decrease|reduce|lower|diminish] {a} by {b}
        deduct {b} from {a}
        remove {b} from {a}
        [compute|calculate|work out|find|reckon|do] {a} minus {b}
        take {a} and [subtract|remove|take away|deduct] {b}
        start [with|at|from] {a} and [subtract|go down|take off] {b}
        count {b} [back|down] from {a}
            subtract: {a} minus {b}
            from {a} [remove|subtract|deduct|take] {b}
            [lower|diminish|cut] the number {a} by {b}
    """),
    "*": lines("""
        multiply {a} by {b}
        multiply {a} and {b}
        multiply {a} with {b}
        multiply [the numbers|these two numbers|both|these]: {a} and {b}
        [compute|calculate|work out|find|reckon|do] {a} times {b}
        take {a} and multiply [it |]by {b}
        take {a} {b} times
            [add up|count] {a} {b} times over
        scale {a} by {b}
        increase {a} {b}-fold
    """),
    "/": lines("""
        divide {a} by {b}
        [split|share|divide] {a} [evenly |equally |fairly |][among|between] {b}
        [split|cut|divide] {a} into {b} equal [parts|pieces|shares]
        [compute|calculate|work out|find] {a} divided by {b}
            take {a} and divide [it |]by {b}
    """),
}
_ASKS = {
    "+": lines("""
        What do [you get|I get|we get] [if|when] [you|I|we] add {a} and {b}?
        How much [is|are] {a} and {b} [together|in total|altogether|all in all]?
        How much [is|makes|does it make to add] {a} plus {b}?
        What number [comes out|results|do I get] [if|when] {b} is added to {a}?
        If [I|you|we] [add|put] {b} to {a}, [what is the result|what comes out|what do I have|what is it]?
        What does {a} plus {b} [make|equal|give|come to|add up to]?
        What do {a} and {b} [make|add up to|come to|sum to|give]?
        Which number is {b} [more|greater|larger|higher] than {a}?
        What is {b} [more|higher|greater|larger] than {a}?
        Which number is [higher|greater|larger|more] than {a} by {b}?
    """),
    "-": lines("""
        What [is left|remains|stays] [if|when] [you|I|we] take {b} [from|away from] {a}?
        How much is {a} minus {b}?
        How much [more|bigger|larger|greater] is {a} than {b}?
        How much [less|smaller|lower] is {b} than {a}?
        What number [comes out|results|do I get] [if|when] {b} is [subtracted|taken] from {a}?
        If [I|you|we] take {b} from {a}, [what is left|what remains|how much is left|what do I have]?
        What does {a} minus {b} [make|equal|give|come to]?
        How [many|much] do I need to add to {b} to [get|reach|have] {a}?
        What must be added to {b} to [make|get|reach] {a}?
        How far is it from {b} to {a}?
        What is left [of|from] {a} [once|after|when] {b} [is|are] [gone|removed|taken|spent|used]?
        By how much is {b} [less|smaller|lower] than {a}?
        How much [less|smaller|lower] than {a} is {b}?
        Which number [comes out|results|do I get] when {b} is [subtracted|removed|taken away] from {a}?
    """),
    "*": lines("""
        What do [you get|I get|we get] [if|when] [you|I|we] multiply {a} [by|and|with] {b}?
        How much is {a} [times|multiplied by] {b}?
        What does {a} times {b} [make|equal|give|come to]?
        What number [comes out|results|do I get] [if|when] {a} is multiplied by {b}?
        How [many|much] is {a} lots of {b}?
        How many is {a} [rows|groups|sets] of {b}?
        If [I|you|we] have {a} {b} times, [how much is that|what is it|what do I have]?
    """),
    "/": lines("""
        How [many times|often] does {b} [go|fit] into {a}?
        What do [you get|I get|we get] [if|when] [you|I|we] divide {a} by {b}?
        How much is {a} divided by {b}?
        If {a} [is|are] [split|shared|divided] [evenly|equally] among {b}, how [much|many] does each get?
    """),
}
_ONE = {
    ("+", 1): lines("""
        the number [right |just |]after {a}
        the next number after {a}
        one more than {a}
    """),
    ("-", 1): lines("""
        the number [right |just |]before {a}
        one less than {a}
    """),
    ("*", 2): lines("""
        [double|twice] {a}
        two times {a}
        {a} doubled
        the double of {a}
    """),
    ("*", 3): lines("""
        [triple|three times|thrice] {a}
        {a} tripled
    """),
    ("*", 12): lines("""
        {a} dozen
        {a} dozens, as a number
    """),
    ("/", 2): lines("""
        half of {a}
        {a} halved
        one half of {a}
    """),
    ("/", 4): lines("""
        a quarter of {a}
        one quarter of {a}
    """),
}
_ONE_ORDERS = {
    ("*", 2): lines("double {a}\ndouble the number {a}"),
    ("*", 3): lines("triple {a}\ntriple the number {a}"),
    ("/", 2): lines("halve {a}\ncut {a} in half"),
}
_GETS = (
    "[buys|finds|gets|picks|receives|collects|wins|is given|earns|makes|adds|brings|orders|catches]"
)
_GOT = "[bought|found|got|picked|received|collected|won|was given|made|added|brought|ordered]"
_GIVES = (
    "[gives {b} to {m}|loses {b}|sells {b}|eats {b}|gives away {b}|throws away {b}|uses {b}"
    "|breaks {b}|drops {b}|hands {b} to {m}|spends {b}|takes {b} out]"
)
_GAVE = (
    "[gave {b} to {m}|lost {b}|sold {b}|ate {b}|gave away {b}|threw away {b}|used {b}|broke {b}"
    "|dropped {b}]"
)
_NOW = (
    "[How many {t} does {n} have now|How many {t} does {n} have|How many does {n} have now"
    "|How many {t} is that|How many {t} are there now|How many {t} now|What is the total"
    "|How many in total|How many {t} has {n} got now|How many {t} are there in all]?"
)
_LEFT = (
    "[How many {t} does {n} have left|How many {t} are left|How many are left|How many remain"
    "|How many {t} remain|How many {t} does {n} still have|What is left"
    "|How many {t} does {n} have now|How many does {n} keep]?"
)
_HOLDER = (
    "[box|bag|basket|drawer|shop|room|jar|bowl|crate|garage|kitchen|garden|cupboard|pocket|shelf]"
)
_HOLDERS = "[boxes|bags|baskets|drawers|shops|rooms|jars|bowls|crates|pockets|shelves|rows]"
_STORIES = {
    "+": lines(f"""
        {{n}} has {{a}} {{t}} and {_GETS} {{b}} more. {_NOW}
        {{n}} had {{a}} {{t}}. [Then|Later|Today|After that|In the evening|On Monday] {{n}} {_GOT} {{b}} more. {_NOW}
        {{n}} has {{a}} {{t}} and {{m}} has {{b}}[ {{t}}|]. How many [{{t}} |]do they have [together|in total|altogether|in all|combined]?
        There are {{a}} {{t}} in [a|the] {_HOLDER}. {{n}} puts in {{b}} more. How many {{t}} are [in it now|in there now|there now|inside]?
        {{n}} has {{a}} {{t}}. {{m}} [gives|hands|brings|sends|lends] {{n}} {{b}} more. {_NOW}
        {{n}} [sees|counts|sells|finds|needs|makes|picks] {{a}} {{t}} in the morning and {{b}} [{{t}} |]in the [evening|afternoon]. [How many {{t}} is that|How many in total|How many is that in all|What is the sum]?
        I [have|had|own|bought|got|counted] {{a}} {{t}} [and|, then] [I |]{_GOT} {{b}} more. How many [{{t}} |]do I have [now|in total|altogether]?
        My {_HOLDER} has {{a}} {{t}}, and I put {{b}} more [in|into it]. How many [{{t}} |]are [there|in it] now?
        {{a}} [people|children|boys|men|women|students|guests|passengers] were [on the bus|in the room|at the party|on the train|in the park] and {{b}} [more |]came. How many are there now?
        [There are|We have|A class has|The club has] {{a}} [boys|cats|red cars|dogs|cows] and {{b}} [girls|dogs|blue cars|birds|goats]. How many [is that|are there|in all|in total]?
        {{n}} [walked|ran|drove|cycled|swam] {{a}} [metres|miles|kilometres|steps|km] on [Monday|Saturday] and {{b}} on [Tuesday|Sunday]. How [far|many] in total?
        {{n}} [paid|spent] {{a}} [dollars|euros|pounds|coins] for a [hat|book|lamp|coat] and {{b}} for a [bag|pen|cup|shirt]. How much [was it|did {{n}} pay|did {{n}} spend] [in total|together|altogether]?
        A [book|lamp|coat|chair] costs {{a}} [dollars|euros|pounds] and a [pen|cup|hat|table] costs {{b}}. [What do they cost together|How much for both|What is the price of both]?
        {{n}} [scored|got|made] {{a}} points [yesterday|in the first game|at first] and {{b}} [today|in the second|later]. [What is the total score|How many points in total|How many is that]?
        {{n}} is {{a}} years old. How old will {{n}} be in {{b}} years?
        {{n}} is {{a}} now. How old is {{n}} [in {{b}} years|{{b}} years from now|after {{b}} years]?
        [Today|Now] {{n}} is {{a}} years old. What age will {{n}} have in {{b}} years?
        {{n}} sees {{a}} [cats|dogs|birds|cows|goats] and {{b}} [horses|ducks|sheep|rabbits]. How many [animals |]is that?
        In the [class|club|school] there are {{a}} [boys|men] and {{b}} [girls|women]. How many [are they|is that] in all?
        We have {{a}} [red|blue|old] cars and {{b}} [green|white|new] ones. How many cars [are there|do we have|is that]?
        The [tower|tree|wall|ladder] was {{a}} [metres|feet|cm] tall and grew by {{b}}. How tall is it now?
        If {{n}} [has|owns] {{a}} {{t}} and [gets|buys|finds] {{b}} more, how many {{t}} [is that|does {{n}} have|are there]?
    """),
    "-": lines(f"""
        {{n}} has {{a}} {{t}} and {_GIVES}. {_LEFT}
        {{n}} had {{a}} {{t}}. [Then|Later|Today|Yesterday|After lunch|On Monday] {{n}} {_GAVE}. {_LEFT}
        There are {{a}} {{t}} in [a|the] {_HOLDER}. {{n}} [takes {{b}} out|takes {{b}}|removes {{b}}|eats {{b}}]. How many [{{t}} |][are left|stay|remain|are still there]?
        {{n}} has {{a}} {{t}}. {{m}} [takes|steals|borrows|buys|eats] {{b}} of them. {_LEFT}
        I [have|had|own|bought] {{a}} {{t}} and [gave away|lost|sold|ate|used|broke] {{b}}. How many [{{t}} |][do I have left|are left|do I still have|remain]?
        {{a}} [people|children|passengers|students|guests|birds] were [on the bus|in the room|at the party|on the train|in the tree] and {{b}} [left|got off|went home|went away|flew away]. How many [are left|stayed|remain|are still there]?
        Of {{a}} [pages|tasks|letters|questions|metres|miles], {{n}} has [done|finished|read] {{b}}. How many are left?
        {{n}} [has|had] {{a}} [dollars|euros|pounds|coins] and [spends|spent|pays|paid] {{b}} [on a hat|for a book|at the shop|for lunch]. How much [is left|does {{n}} have left|money is left|remains]?
        {{n}} has {{a}} {{t}} and {{m}} has {{b}}. How many more [{{t}} |]does {{n}} have[ than {{m}}|]?
        A [rope|road|board|ribbon] of {{a}} [metres|feet|cm] is cut by {{b}}. How long is [it now|the rest|what is left]?
        {{n}} is {{a}} years old and {{m}} is {{b}}. How much older is {{n}}?
        {{n}} needs {{a}} {{t}} and has {{b}}. How many [more |][does {{n}} need|are missing|are still needed]?
        If {{n}} [has|owns] {{a}} {{t}} and [loses|sells|eats|gives away] {{b}}, how many [are left|remain|does {{n}} keep]?
        The [bus|hall|cinema|train] has {{a}} seats and {{b}} are taken. How many are free?
        A [coat|phone|bike] costs {{a}} [dollars|euros|pounds] and is now {{b}} cheaper. What [is the price now|does it cost now]?
    """),
    "*": lines(f"""
        {{n}} has {{a}} {_HOLDERS} with {{b}} {{t}} each. How many {{t}} [does {{n}} have|are there|is that|in total]?
        There are {{a}} {_HOLDERS}. [Each|Every one|Each of them] has {{b}} {{t}}. How many {{t}} are there[ in all| in total|]?
        [Each|Every] {_HOLDER} [has|holds|contains|gets] {{b}} {{t}}. How many {{t}} [are in {{a}} of them|do {{a}} of them have|do {{a}} hold|is that for {{a}} of them]?
        A [ticket|book|pen|cup|hat|lamp] costs {{b}} [dollars|euros|pounds|coins]. [How much|What] do {{a}} cost?
        {{n}} [buys|sells|orders] {{a}} [books|hats|lamps|tickets|cups] for {{b}} [dollars|euros|pounds] each. [How much is that|What is the total|How much does it cost|How much in all]?
        {{n}} [reads|walks|writes|runs|makes|sells|eats] {{b}} [pages|miles|letters|{{t}}] [a|every|each|per] day. How many [is that |]in {{a}} days?
        [I|We] have {{a}} packs of {{b}} {{t}}. How many {{t}} [do I have|is that|are there|in total]?
        A [car|train|bike|bus] goes {{b}} [miles|km|kilometres] an hour. How far does it go in {{a}} hours?
        {{a}} [friends|children|people] each [bring|get|have|eat|carry] {{b}} {{t}}. How many {{t}} [is that|in all|are there|in total]?
        {{n}} has {{b}} {{t}} and {{m}} has {{a}} times as many. How many does {{m}} have?
    """),
    "/": lines("""
        {n} [shares|splits|divides] {a} {t} [equally|evenly|fairly] among {b} [friends|children|people|bags|boxes]. How many [{t} |]does each [one |]get?
        {b} [friends|children|people] share {a} {t} [equally|evenly]. How many [{t} |][does each get|for each|are for each]?
        {a} {t} are packed into {b} [bags|boxes|baskets], the same number in each. How many [{t} |]are in [each|one]?
        {b} [tickets|books|cups|hats] cost {a} [dollars|euros|pounds]. What does one cost?
        {a} {t} are shared [equally|evenly] [by|among|between] {b} [friends|children|people]. How many [{t} |]does each get?
        If {b} [friends|children|people] share {a} {t}, how many [{t} |]does each get?
        {n} puts {a} {t} into {b} [bags|boxes|baskets], [equally|as many in each]. How many [{t} |]are in one?
    """),
}
_THREE = lines("""
    {a} + {b} + {c}
    {a}+{b}+{c}
    the sum of {a}, {b} and {c}
    the total of {a}, {b}, and {c}
    {a}, {b} and {c} [together|added up|combined|in total|altogether]
    {a} plus {b} plus {c}
    {a} and {b} and {c} [together|added up|in all]
    all of {a}, {b}, {c} added
""")
_THREE_ORDERS = lines("""
    add {a}, {b} and {c}
    [sum|sum up|add up|total|tot up] {a}, {b} and {c}
    add [the numbers|these|up]: {a}, {b}, {c}
    add {a} {b} {c}
    put {a}, {b} and {c} together
""")
_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def say(source: Source, value: int) -> str:
    """A number below 10,000 in words."""
    if value < 20:
        return _SMALL[value]
    if value < 100:
        rest = value % 10
        return _TENS[value // 10 - 2] + (source.choice("--- ") + _SMALL[rest] if rest else "")
    size, unit = (100, "hundred") if value < 1000 else (1000, "thousand")
    head, rest = value // size, value % size
    first = "a" if head == 1 and source.chance(0.2) else say(source, head)
    if not rest:
        return f"{first} {unit}"
    joined = " and " if rest < 100 and source.chance(0.6) else " "
    return f"{first} {unit}{joined}{say(source, rest)}"


def shown(source: Source, values: list[int], share: float = 0.14) -> tuple[list[str], str]:
    """Numbers as people write them, and the line of reasoning that reads those in words."""
    if not source.chance(share):
        return [str(value) for value in values], ""
    texts = [
        say(source, value) if value < 1000 and source.chance(0.75) else str(value)
        for value in values
    ]
    pairs = zip(texts, values, strict=True)
    read = [f"{text} = {value}" for text, value in pairs if text != str(value)]
    return texts, ", ".join(read) + "\n" if read else ""


def reason_add(a: int, b: int) -> str:
    """Write a + b out in columns, ones first."""
    x, y = str(a)[::-1], str(b)[::-1]
    lines, carry, done = [f"{' '.join(x)} + {' '.join(y)}"], 0, ""
    width = max(len(x), len(y))
    for i in range(width):
        p, q = int(x[i : i + 1] or 0), int(y[i : i + 1] or 0)
        total = p + q + carry
        done = (str(total) if i == width - 1 else str(total % 10)) + done
        lines.append(f"{p}+{q}{'+1' if carry else ''}={total}, {done}")
        carry = total // 10
    return "\n".join(lines)


def reason_subtract(a: int, b: int) -> str:
    """Write a - b out in columns, ones first; a smaller first number turns the two round."""
    if a < b:
        return f"-({b} - {a})\n" + reason_subtract(b, a)
    x, y = str(a)[::-1], str(b)[::-1]
    lines, borrow, done = [f"{' '.join(x)} - {' '.join(y)}"], 0, ""
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i : i + 1] or 0)
        left = p - q - borrow
        tail = "-1" if borrow else ""
        if left < 0:
            line, borrow = f"{p}-{q}{tail}<0, {p + 10}-{q}{tail}={left + 10}", 1
            left += 10
        else:
            line, borrow = f"{p}-{q}{tail}={left}", 0
        done = str(left) + done
        lines.append(f"{line}, {done}")
    return "\n".join(lines)


def reason_multiply(a: int, b: int) -> str:
    """Write a * b out: one digit times a number in columns; two digits as tens and ones, then
    added.
    """
    if b > 9 and a <= 9:
        a, b = b, a
    if b > 9:
        tens, ones = a * (b // 10 * 10), a * (b % 10)
        parts = [f"{a} * {b // 10 * 10} + {a} * {b % 10}"]
        parts += [_columns(a, b // 10), f"{a}*{b // 10 * 10}={tens}"]
        parts += [_columns(a, b % 10), f"{a}*{b % 10}={ones}"]
        return "\n".join([*parts, reason_add(tens, ones)])
    return _columns(a, b)


def _columns(a: int, b: int) -> str:
    x = str(a)[::-1]
    lines, carry, done = [f"{' '.join(x)} * {b}"], 0, ""
    for i, digit in enumerate(x):
        total = int(digit) * b + carry
        done = (str(total) if i == len(x) - 1 else str(total % 10)) + done
        lines.append(f"{digit}*{b}{f'+{carry}' if carry else ''}={total}, {done}")
        carry = total // 10
    return "\n".join(lines)


def reason_divide(a: int, b: int) -> str:
    """Write a / b out for one digit b that divides it, left to right."""
    lines, left, done = [], 0, ""
    for digit in str(a):
        part = left * 10 + int(digit)
        done += str(part // b)
        lines.append(f"{part}/{b}={part // b}, {part}-{part // b * b}={part % b}, {done}")
        left = part % b
    return "\n".join([*lines, str(int(done))])


def number(source: Source, num_digits_max: int) -> int:
    """Return a number with an equal chance for each length."""
    size = source.randint(1, num_digits_max)
    return source.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def operate(op: str, a: int, b: int) -> tuple[str, str]:
    """Return (reasoning, answer) of `a op b`: first what is reckoned, then how."""
    if op == "+":
        reasoning, answer = reason_add(a, b), a + b
    elif op == "-":
        reasoning, answer = reason_subtract(a, b), a - b
    elif op == "/":
        reasoning, answer = reason_divide(a, b), a // b
    else:
        reasoning, answer = reason_multiply(a, b), a * b
    return f"{a} {op} {b}\n{reasoning}", str(answer)


def arithmetic(source: Source) -> Turn:
    """Return a sum, a difference, a product or a quotient, plain or told as a story."""
    op = source.choices("+-*/", (8, 8, 7, 2))[0]
    if source.chance(0.07):
        return _one(source)
    if op == "+" and source.chance(0.1):
        return _three(source)
    story = source.chance(0.34)
    a, b = _operands(source, op, story)
    (x, y), read = shown(source, [a, b])
    n, m = source.sample(NAMES, 2)
    if story:
        said = asked(source, questions=_STORIES[op])
    else:
        said = asked(
            source,
            nouns=(*_SIGNS[op], *_NOUNS[op]),
            orders=_ORDERS[op],
            questions=_ASKS[op],
            whole=_BARE[op],
        )
    if op == "-" and a < b and not any(form in said for form in ("{a} -", "{a}-", "{a} minus")):
        a, b, x, y = b, a, y, x  # What is left, or a gap between two, is never negative.
    if read:
        said = _spaced(said)
    question = said.format(a=x, b=y, n=n, m=m, t=source.choice(COUNTED))
    reasoning, answer = operate(op, a, b)
    return Turn(question, f"sum: {read}{reasoning}", answer, f"{a}{op}{b}", "number", (answer,))


def _spaced(said: str) -> str:
    """The wording with spaces around signs, as between numbers in words."""
    return re.sub(r"\}([-+*/x:])(?=\{)", r"} \1 ", said)


def _operands(source: Source, op: str, story: bool) -> tuple[int, int]:
    if op == "/":
        b = source.randint(2, 9)
        return b * source.randint(1, 99 if story else 200), b
    if op == "*":
        if source.chance(0.25):
            return source.randint(10, 99), source.randint(10, 30)
        a, b = number(source, 3), source.randint(1 if story else 0, 9)
        return (b, a) if source.chance(0.4) else (a, b)
    digits = source.choice((2, 2, 3, 3, 4))
    a, b = number(source, digits), number(source, digits)
    if source.chance(0.2):
        b = number(source, 2)
    if op == "-" and a < b and (story or source.chance(0.85)):
        a, b = b, a
    return a, b


def _one(source: Source) -> Turn:
    """What one number makes: double it, half of it, the next one."""
    op, b = source.choice(tuple(_ONE))
    a = number(source, 2 if b == 12 else 3)
    if op == "/":
        a *= b
    a = max(a, b)
    (x,), read = shown(source, [a])
    question = asked(source, nouns=_ONE[op, b], orders=_ONE_ORDERS.get((op, b), ())).format(a=x)
    reasoning, answer = operate(op, a, b)
    return Turn(question, f"sum: {read}{reasoning}", answer, f"{a}{op}{b}", "number", (answer,))


def _three(source: Source) -> Turn:
    a, b, c = number(source, 2), number(source, 2), number(source, 2)
    (x, y, z), read = shown(source, [a, b, c])
    said = asked(source, nouns=_THREE, orders=_THREE_ORDERS)
    question = (_spaced(said) if read else said).format(a=x, b=y, c=z)
    reasoning = f"sum: {read}{a} + {b} + {c}\n{reason_add(a, b)}\n{reason_add(a + b, c)}"
    answer = str(a + b + c)
    return Turn(question, reasoning, answer, f"{a}+{b}+{c}", "number", (answer,))


# Dates, weekdays, months.

_AFTER = lines("""
    [What|Which] [date|day] is {n} after {d}?
    What is the date {n} after {d}?
    [What|Which] date [comes|falls] {n} after {d}?
    Today is {d}. [What|Which] [date|day] is [it |]in {n}?
    [Today is|It is|Now it is|It's] {d}. What [date|day] will it be in {n}?
    If today is {d}, what [date|day] [will it be|is it|comes] in {n}?
    If it's {d} [now|today], what will the date be {n} from now?
    [What|Which] [day|date] is {n} from {d}?
    [What|Which] date do I [get|reach] [if|when] I [add|count] {n} to {d}?
    [I sent|We sent|They posted] a [letter|parcel|box] on {d}. It [takes|needs] {n}. [When does it arrive|When will it be there|On what date does it come]?
    The [meeting|party|exam|game] [is|was] [moved|delayed|pushed back] from {d} by {n}. When is it now?
    The bill [came|was sent] on {d} and is due {n} later. [When is it due|What is the due date]?
    {w} was born {n} after {d}. When was {w} born?
    A [visa|ticket|pass] from {d} [is good for|lasts] {n}. When does it [end|run out]?
    In {n} from {d}, what is the date?
""")
_AFTER_NOUNS = lines("""
    {n} after {d}
    the [date|day] {n} after {d}
    {d} plus {n}
    {n} [later than|past|following] {d}
    the [date|day] that [comes|falls|is] {n} after {d}
    the date in {n} if today is {d}
    {d} and {n} [more|on top|later]
    {n} from {d}
    {d} [moved|shifted] [forward|ahead|on] by {n}
""")
_AFTER_ORDERS = lines("""
    add {n} to {d}
    count {n} [forward|on|ahead|up] from {d}
    [go|move] {n} [forward|on|ahead] from {d}
    start [on|at|from] {d} and [go|count] {n} [forward|on|ahead]
""")
_BEFORE = lines("""
    [What|Which] [date|day] is {n} before {d}?
    [What|Which] [date|day] was [it |]{n} before {d}?
    Today is {d}. What [date|day] was [it |]{n} ago?
    [Today is|It is|Now it is|It's] {d}. What was the date {n} ago?
    If today is {d}, what [date|day] was it {n} ago?
    [What|Which] date [comes|falls|lies] {n} before {d}?
    [What|Which] date do I get if I [take|subtract] {n} from {d}?
    The [meeting|party|exam|game] is {n} earlier than {d}. When is it?
    I must [pay|order|book|call] {n} before {d}. [When is that|On which date|What date is that]?
    {w} left {n} before {d}. When did {w} leave?
""")
_BEFORE_NOUNS = lines("""
    {n} before {d}
    the [date|day] {n} before {d}
    {d} minus {n}
    {n} [earlier than|prior to|ahead of] {d}
    the [date|day] that was {n} before {d}
    the date {n} ago if today is {d}
    {d} [moved|shifted] back by {n}
""")
_BEFORE_ORDERS = lines("""
    subtract {n} from {d}
    take {n} [off|from|away from] {d}
    count {n} [back|backwards|down] from {d}
    go {n} back from {d}
    start [on|at|from] {d} and [go|count] {n} back
""")
_WEEK_AFTER = lines("""
    [What|Which] [day|weekday|day of the week] is {n} after {w}?
    Today is {w}. What day is it in {n}?
    [Today is|It is|It's|Now it's] {w}. [What|Which] [day|weekday|day of the week] [will it be|is it|comes] [in {n}|{n} from now|{n} later|after {n}]?
    If today is {w}, [what|which] [day|weekday] [will it be|is it] in {n}?
    [What|Which] [weekday|day] comes {n} after {w}?
    [I leave|We leave|{p} leaves|The trip starts] on [a |]{w} and [come back|return|we return|it ends] {n} later. [What|Which] [day|weekday] is that?
    {p} [starts|arrives|calls] on {w} and [ends|leaves|calls again] {n} later. On [what|which] day?
    The [shop|pool|museum] opens {n} after {w}. [What|Which] day is that?
    {n} from {w} [is what day|is which day|what day is it]?
""")
_WEEK_AFTER_NOUNS = lines("""
    {n} after {w}
    the [day|weekday|day of the week] {n} after {w}
    {w} plus {n}
    the [day|weekday] in {n} if today is {w}
    {n} [from|past|later than] {w}
    the [day|weekday] that comes {n} after {w}
""")
_WEEK_ORDERS = lines("""
    count {n} [forward|on|ahead] from {w}
    add {n} to {w}
    go {n} [forward|on|ahead] from {w}
""")
_WEEK_BEFORE = lines("""
    [What|Which] [day|weekday|day of the week] [is|was] {n} before {w}?
    Today is {w}. What day was it {n} ago?
    [Today is|It is|It's|Now it's] {w}. [What|Which] [day|weekday|day of the week] was it {n} ago?
    If today is {w}, [what|which] [day|weekday] was it {n} [ago|before|earlier]?
    [What|Which] [weekday|day] comes {n} before {w}?
    {p} came {n} before {w}. On [what|which] day?
""")
_WEEK_BEFORE_NOUNS = lines("""
    {n} before {w}
    the [day|weekday|day of the week] {n} before {w}
    {w} minus {n}
    the [day|weekday] {n} ago if today is {w}
    {n} [earlier than|prior to] {w}
""")
_WEEK_BEFORE_ORDERS = lines("""
    count {n} [back|backwards] from {w}
    go {n} back from {w}
    take {n} [off|from] {w}
""")
_DAYS_IN = lines("""
    How many days [are in|are there in|has|does it take to fill] {m}?
    How many days does {m} have?
    How long is {m} in days?
    How many days are there in the month of {m}?
    How many days long is {m}?
    [How many days make up|How many days are counted in] {m}?
    [When|On what date] does {m} end, on what number of day?
""")
_DAYS_IN_NOUNS = lines("""
    the number of days in {m}
    the [length|days] of {m} in days
    how many days {m} has
    days in {m}
    the [day count|amount of days] of {m}
    how many days there are in {m}
    the last day of {m} as a number
""")
_NEXT_MONTH = lines("""
    [What|Which] month [comes|is|follows] after {m}?
    [What|Which] month follows {m}?
    If it is {m} now, what month is next?
    It is {m}. [What|Which] month [comes|is] next?
    {m} is over. Which month begins?
""")
_NEXT_MONTH_NOUNS = lines("""
    the month after {m}
    the month [following|that follows|right after|that comes after] {m}
    the next month after {m}
""")
_LAST_MONTH = lines("""
    [What|Which] month [comes|is|was] before {m}?
    [What|Which] month precedes {m}?
    If it is {m} now, what was last month?
    It is {m}. [What|Which] month was [the last|it before]?
""")
_LAST_MONTH_NOUNS = lines("""
    the month before {m}
    the month [preceding|that precedes|right before|that comes before] {m}
    the previous month if it is {m}
""")
_NEXT_DAY = lines("""
    [What|Which] day [comes|is] after {w}?
    [What|Which] [day|weekday] follows {w}?
    If today is {w}, what [day |]is tomorrow?
    [Today is|It's|It is] {w}. What [day |][is|comes] [tomorrow|next]?
    Yesterday was {w}. What [day |]is [it |]today?
    If yesterday was {w}, [what|which] day is [it |]today?
""")
_NEXT_DAY_NOUNS = lines("""
    the day after {w}
    the [day|weekday] [following|that follows|right after|that comes after] {w}
    the next [day|weekday] after {w}
    tomorrow if today is {w}
""")
_LAST_DAY = lines("""
    [What|Which] day [comes|is] before {w}?
    [What|Which] [day|weekday] precedes {w}?
    If today is {w}, what [day |]was yesterday?
    [Today is|It's|It is] {w}. What [day |]was yesterday?
    Tomorrow is {w}. What [day |]is [it |]today?
    If tomorrow is {w}, [what|which] day is [it |]today?
""")
_LAST_DAY_NOUNS = lines("""
    the day before {w}
    the [day|weekday] [preceding|that precedes|right before|that comes before] {w}
    the previous day if it is {w}
    yesterday if today is {w}
""")
_LEAP = lines("""
    [Is|Was] {y} a leap year?
    [Is|Was] the year {y} a leap year?
    [Does|Did] {y} have a leap day?
    {y}: leap year or not? Say yes or no.
    Is {y} a leap year? [Say|Answer] yes or no.
    [Say yes or no|Yes or no]: is {y} a leap year?
    leap year or no leap year: {y}?
    leap year {y}?
    [Does|Did] the year {y} have [366 days|an extra day]?
    Is there a February 29 in {y}?
""")
_FEBRUARY = lines("""
    How many days [are in|were in|has|are there in] February {y}?
    How many days [did|does] February {y} have?
    How long is February {y} in days?
    How many days does February have in {y}?
""")
_YEAR = lines("""
    How many days [are|are there|were] in {y}?
    How many days [has|did|does] the year {y}[ have|]?
    How long is the year {y} in days?
""")
_TOMORROW = lines("""
    Today is {d}. What [date |]is [it |]tomorrow?
    If today is {d}, what [date |]is tomorrow?
    [What|Which] date comes after {d}?
    What is the [day|date] after {d}?
    [What|Which] [date|day] follows {d}?
    Yesterday was {d}. What [date |]is [it |]today?
""")
_YESTERDAY = lines("""
    Today is {d}. What [date |]was [it |]yesterday?
    If today is {d}, what [date |]was yesterday?
    [What|Which] date comes before {d}?
    What is the [day|date] before {d}?
    [What|Which] [date|day] precedes {d}?
    Tomorrow is {d}. What [date |]is [it |]today?
""")


def reason_after(month: int, day: int, days: int) -> tuple[str, str]:
    """Add days, then take whole months off. Returns (reasoning, answer)."""
    total = day + days
    lines = [f"{MONTHS[month]} {day} + {days}", f"{day} + {days} = {total}"]
    while total > MONTH_DAYS[month]:
        size = MONTH_DAYS[month]
        lines.append(f"{MONTHS[month]} {size}, {total} - {size} = {total - size}")
        total -= size
        month = (month + 1) % 12
    answer = f"{MONTHS[month]} {total}"
    return "\n".join([*lines, answer]), answer


def reason_before(month: int, day: int, days: int) -> tuple[str, str]:
    """Take days off, adding the month before while there are too few. Returns (reasoning,
    answer).
    """
    lines = [f"{MONTHS[month]} {day} - {days}"]
    while day <= days:
        month = (month - 1) % 12
        size = MONTH_DAYS[month]
        lines.append(f"{MONTHS[month]} {size}, {day} + {size} = {day + size}")
        day += size
    answer = f"{MONTHS[month]} {day - days}"
    return "\n".join([*lines, f"{day} - {days} = {day - days}", answer]), answer


def reason_weekday(weekday: int, days: int, sign: int) -> tuple[str, str]:
    """Take whole weeks off the offset, then walk day by day. Returns (reasoning, answer)."""
    left, lines = days % 7, [f"{WEEKDAYS[weekday]} {'+' if sign > 0 else '-'} {days}"]
    if days >= 7:
        lines.append(f"{days} - {days - left} = {left}")
    walk = [f"{i} {WEEKDAYS[(weekday + sign * i) % 7]}" for i in range(left + 1)]
    return "\n".join([*lines, " ".join(walk)]), WEEKDAYS[(weekday + sign * left) % 7]


def span(source: Source, days: int) -> tuple[str, str]:
    """So many days as people say it, and the reasoning that makes a number of it."""
    if days == 7 and source.chance(0.7):
        return source.choice(("one week", "a week", "1 week")), "7\n"
    if days == 14 and source.chance(0.7):
        return source.choice(("two weeks", "2 weeks", "a fortnight")), "14\n"
    if days in (21, 28) and source.chance(0.6):
        weeks = days // 7
        text = source.choice((f"{weeks} weeks", f"{say(source, weeks)} weeks"))
        return text, f"{weeks} * 7 = {days}\n"
    unit = "day" if days == 1 else "days"
    if source.chance(0.18):
        word = say(source, days)
        return f"{word} {unit}", f"{word} = {days}\n"
    return f"{days} {unit}", ""


def _days(source: Source, top: int) -> int:
    return source.choice((7, 7, 14, 21)) if source.chance(0.14) else source.randint(1, top)


def _leap(source: Source) -> Turn:
    year = source.randint(1980, 2060)
    leap = year % 4 == 0
    kind = source.randrange(3)
    said = asked(source, questions=(_LEAP, _FEBRUARY, _YEAR)[kind])
    short = year % 100
    verdict = "leap year" if leap else "not a leap year"
    reasoning = f"leap: {short} / 4 = {short // 4}, {short % 4} left\n{verdict}"
    answer = (("no", "yes"), ("28", "29"), ("365", "366"))[kind][leap]
    question = said.format(y=year)
    return Turn(question, reasoning, answer, f"leap {kind} {year}", "number", (answer,))


def _calendar(source: Source) -> Turn:
    """A fact of the calendar. They are few, so only wordings are held out."""
    month, weekday = source.randrange(12), source.randrange(7)
    kind = source.randrange(5)
    questions, nouns = (
        (_DAYS_IN, _DAYS_IN_NOUNS),
        (_NEXT_MONTH, _NEXT_MONTH_NOUNS),
        (_LAST_MONTH, _LAST_MONTH_NOUNS),
        (_NEXT_DAY, _NEXT_DAY_NOUNS),
        (_LAST_DAY, _LAST_DAY_NOUNS),
    )[kind]
    answer = (
        str(MONTH_DAYS[month]),
        MONTHS[(month + 1) % 12],
        MONTHS[month - 1],
        WEEKDAYS[(weekday + 1) % 7],
        WEEKDAYS[weekday - 1],
    )[kind]
    name, day = MONTHS[month], WEEKDAYS[weekday]
    small = source.chance(0.2)
    said = asked(source, questions=questions, nouns=nouns)
    question = said.format(m=name.lower() if small else name, w=day.lower() if small else day)
    sought = ("days in", "date after", "date before", "day after", "day before")[kind]
    reasoning = f"{sought} {name if kind < 3 else day}: {answer}"
    return Turn(question, reasoning, answer, "", "fact", (answer,))


def _show(source: Source, month: int, day: int) -> str:
    name = MONTHS[month].lower() if source.chance(0.12) else MONTHS[month]
    end = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    style = source.random()
    if style < 0.55:
        return f"{name} {day}"
    if style < 0.7:
        return f"{day} {name}"
    if style < 0.85:
        return f"{name} {day}{end}"
    return f"the {day}{end} of {name}"


def dates(source: Source) -> Turn:
    """Return a question about the calendar."""
    kind = source.choices(("after", "before", "week", "calendar", "leap"), (32, 20, 25, 18, 7))[0]
    if kind == "calendar":
        return _calendar(source)
    if kind == "leap":
        return _leap(source)
    sign = 1 if source.chance(0.6) else -1
    if kind == "week":
        return _weekday_turn(source, sign)
    month = source.randrange(12)
    day = source.randint(1, MONTH_DAYS[month])
    after = kind == "after"
    reason = reason_after if after else reason_before
    if source.chance(0.1):
        reasoning, answer = reason(month, day, 1)
        said, read, days = asked(source, questions=_TOMORROW if after else _YESTERDAY), "", 1
        text = ""
    else:
        days = _days(source, 30)
        text, read = span(source, days)
        said = asked(
            source,
            questions=_AFTER if after else _BEFORE,
            nouns=_AFTER_NOUNS if after else _BEFORE_NOUNS,
            orders=_AFTER_ORDERS if after else _BEFORE_ORDERS,
        )
        reasoning, answer = reason(month, day, days)
    question = said.format(n=text, d=_show(source, month, day), w=source.choice(NAMES))
    return Turn(
        question,
        f"date: {read}{reasoning}",
        answer,
        f"{kind} {month} {day} {days}",
        "date",
        (answer,),
    )


def _weekday_turn(source: Source, sign: int) -> Turn:
    weekday, days = source.randrange(7), _days(source, 31)
    text, read = span(source, days)
    if sign > 0:
        said = asked(source, questions=_WEEK_AFTER, nouns=_WEEK_AFTER_NOUNS, orders=_WEEK_ORDERS)
    else:
        said = asked(
            source, questions=_WEEK_BEFORE, nouns=_WEEK_BEFORE_NOUNS, orders=_WEEK_BEFORE_ORDERS
        )
    shown_day = WEEKDAYS[weekday].lower() if source.chance(0.15) else WEEKDAYS[weekday]
    question = said.format(n=text, w=shown_day, p=source.choice(NAMES))
    reasoning, answer = reason_weekday(weekday, days, sign)
    key = f"weekday {weekday} {days} {sign}"
    return Turn(question, f"weekday: {read}{reasoning}", answer, key, "weekday", (answer,))
