r"""Comparison of mathematical answers as text: LaTeX spelling, numbers, lists, brackets. Pure.

Most answers are decided here: the same text, two numbers, tuples of different length. The rest are
pairs of expressions for math-verify. The items of tuples, intervals and matrices are compared one
by one, because math-verify's grammar reads them ten times as fast as the whole.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from samplers.rows.boxed import boxed_answer

MAX_LENGTH = 2000
"""Longest answer in characters; a longer one is wrong."""

MAX_DEPTH = 30
"""Deepest nesting of brackets that math-verify gets."""

_CHARACTERS = str.maketrans(
    {
        "\u2212": "-",  # minus
        "\u2013": "-",  # dash
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u222a": r"\cup ",
        "\u00b1": r"\pm ",
        "\u00b0": r"^\circ ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00a0": " ",
        "\u2009": " ",
    }
)
INEQUALITY = r"[<>]|\\[lgn]eq?(?![a-z])"
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in [
        (  # within a number: 58,\!500
            r"(?<=\d)\s*(?:\{,\}|,?\s*\\[,!])(?:\s|\\[,!])*(?=\d{3}(?!\d))"
            r"|(?<=\d)\\[,!](?=\d)",
            "",
        ),
        (r"^\\[\[(](.*)\\[\])]$", r"\1"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\text\s*\{\s*\\\$\s*\}", r"\\$"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|qquad|quad)(?![a-zA-Z])|(?<!\\)\\[,!;:> ]|~", " "),
        (r";\s*$", ""),
        (r";", ", "),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", r"^\\circ"),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?([\d.]+)\^\\circ\s*[)}]?",
            r"\1(\\frac{\2\\pi}{180})",
        ),
        (r"\^\\circ\s*(?:\\text\s*\{)?\s*([CF]?)\s*\}?$", r" degree \1"),
        (r"\\math(?:bf|it)\s*\{([a-zA-Z])\}|\\(?:mathrm|text)\s*\{\s*([ei])\s*\}", r" \1\2"),
        (r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|mbox)\s*(?=\{)", r"\\text"),
        (r"\\frac\s*(\d|\\pi)\s*(?=[\d{]|\\pi)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d|\\pi)", r"\1{\2}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(\d)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),  # a mixed number
        (r"\s*(?:\\text\s*\{\s*percent\s*\}|percent)$", r"\\%"),
        (r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":"),
        (  # x<-1 or x>1
            rf"((?:{INEQUALITY})[^,<>]*?)(?:\\text\s*\{{\s*or\s*\}}|\sor\s)"
            rf"(?=[^,]*(?:{INEQUALITY}))",
            r"\1\\cup ",
        ),
        (r"\\text\s*\{(\s*,?\s*)\}", r"\1"),
        (
            r"(?:,\s*)?(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\s(?:and|or)\s)\s*|(?<=\d)\s*\\&\s*(?=\d)",
            ", ",
        ),
        (r"(=[^=,]*?)\s*\\(?:lor|vee)(?![a-zA-Z])\s*(?=[^=,]*=)", r"\1, "),  # x=1\lor x=2
        (r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])", r"\1\\times10^{\2}"),
        (r"^\((\w+)\)_", r"\1_"),
        (r"^(\d+)_\{?10\}?$", r"\1"),  # base ten
        (  # the inequality of \{x|x>0\}
            r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid(?![a-z]))\s*"
            rf"(?=.*\1)([^=]*(?:{INEQUALITY})[^=]*)\\\}}$",
            r"\2",
        ),
        (  # \text{B}, but not \text{no}, which would be read as a product
            r"^\\text\s*\{(?!\s*[A-Za-z]{2}\s*\})([^{}]*)\}$",
            r"\1",
        ),
    ]
]
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,)\]}])")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}")
_UNIT_NAMES = (
    "meter metre m, centimeter centimetre cm, millimeter millimetre mm, kilometer kilometre km, "
    "inch in, foot feet ft, yard yd, mile mi, gram g, kilogram kg, pound lb, ounce oz, "
    "liter litre l, milliliter ml, gallon gal, second sec s, minute min, hour hr h, day, week, "
    "month, year yr, dollar, cent, unit, celsius c, fahrenheit f, radian rad, per, mph, "
    "2 square sq squared, 3 cubic cubed, person people, student, way, point"
)
_UNITS = {word: names.split()[0] for names in _UNIT_NAMES.split(",") for word in names.split()}
"""Spelling of a unit -> its name."""

_AMOUNTS = (
    "hundred thousand million billion trillion dozen pair half third quarter fold time factorial "
    "not more"
)
"""Words that change a number, without the s of a plural. One other word in `\\text` behind a number
is what was counted, as apples in `5\\text{ apples}`."""

_UNIT = re.compile(
    r"(?:(?<=[\w})])\s*\\text\s*\{([^{}\d]+)\}"
    r"|(?<=\d) ([mgs])|(?:(?<=\d)|(?<=[\w})])\s)\s*([A-Za-z][A-Za-z/][A-Za-z/. ]{0,40}))"
    r"\s*(?:\^\s*\{?(\d)\}?)?\s*$"
)
_LETTERS = re.compile(r"(\\text\s*\{\s*)?([A-Za-z][A-Za-z' -]+?)\s*\}?")

_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_TIMES = r"(?:\\times|\\cdot|\*)"
_PLAIN = rf"(?:(?:{_DIGITS}{_TIMES})?10\^(?:\{{[+-]?\d{{1,4}}\}}|\d{{1,4}})|{_DIGITS})"
"""A decimal, or one with a power of ten."""

_NUMBER = re.compile(
    rf"([+-]?)(?:(?P<p>{_PLAIN})(?:/(?P<q>[+-]?{_PLAIN}))?"
    rf"|\\frac\{{(?P<n>[+-]?{_PLAIN})\}}\{{(?P<d>[+-]?{_PLAIN})\}}"
    r"|(?P<whole>\d+)\\frac\{(?P<part>\d+)\}\{(?P<of>\d+)\})"
)
_BRACKETED = re.compile(
    rf"(?:(?<=/)|(?<=\{{)|(?<=\\times)|(?<=\\cdot)|(?<=\*)|(?<![^+-]))"
    rf"(?:(?:\(([+-]?{_PLAIN})\)|\{{([+-]?{_PLAIN})\}})(?=[/}}]|$)|[({{](10)[)}}](?=\^))"
)
"""A number in brackets of its own: in a ratio, a fraction or a product, and as a base."""

_GROUPED = re.compile(r"([+-]?)(?:\((.*)\)|\{(.*)\})")

_OF_NUMBERS = re.compile(r"(?:\\?(?:frac|sqrt|pi|times|cdot|circ|mp|pm)|[\d.\s{}()\[\]+\-*/^ie])+")
"""What has no names, and no functions but roots."""

_ROOT_OR_DEGREE = r"\^(?:\\circ|\{[^{}]*(?:/|\.|\\frac))"
_FACTOR = rf"(?<![\d.^]){_DIGITS}\)?(?:{_TIMES}?(?:\\pi|\\sqrt\{{[^{{}}]*\}}))*"
_I = r"(?<![\\a-z}])i(?![\\a-z])"  # with a plain factor
_POWER = r"(?:\^(?:\d|\{\d+\}))"
_LEFT_TO_DO = [
    re.compile(pattern)
    for pattern in (
        r"^(?!.*(?<![a-z])i(?![a-z])).*[\w)}](?:[+-]|\\[mp][mp])",
        rf"(?<![\d.\w}}^]){_DIGITS}[+-]{_DIGITS}(?![\d.\w\\(^])",
        rf"{_FACTOR}{_TIMES}(?:\((?=-?{_DIGITS}{_POWER}?\)))?-?(?!10\^){_DIGITS}(?![\d.]|{_ROOT_OR_DEGREE})"
        rf"|{_FACTOR}(?:{_TIMES}\(?-?\\frac\{{\d|\(-?{_DIGITS}{_POWER}?\))"
        rf"|(?<![\d.])(?!10\^){_DIGITS}{_POWER}{_TIMES}{_DIGITS}",
        rf"{_I}.*{_I}|\([^()]*{_I}[^()]*\)\^",
        rf"(?:(?<![\d.])(?!10\^){_DIGITS}|\({_DIGITS}\))(?!{_ROOT_OR_DEGREE})\^",
    )
]
"""Sums, but not of complex numbers; then sums, products, products and powers of complex numbers,
and whole powers of plain numbers. `2+\\sqrt{3}` is finished where the ground truth has a sum too,
`1+i`, `10^{3}` and `2^{1/2}` always."""

_IN_BASE = re.compile(r"((?=[A-Z]*\d)[0-9A-Z]+)_\{?(\d+)\}?")
"""A number in a base begins with a digit, because `V_1` is a name."""

_TIME = re.compile(r"\d{1,2}:[0-5]\d")
"""What may be a time is not reduced as a ratio: 2:30 is not 1:15."""

_COMMANDS = "angle|triangle|sin|cos|tan|alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|phi|omega"
_NAME = re.compile(
    rf"(?:[A-Za-z]+|\\text\s*\{{[^{{}}]*\}}|m?(?:\\(?:{_COMMANDS})(?![a-z])\s*)+[A-Za-z]*)"
    r"'*(?:_(?:\w|\{[^{}]*\}))?"
    r"|[f-hp-rA-Z]'*(?:\^\{-1\}|_\w)?\((?:[^()]|\([^()]*\))*\)|[a-z]\(\w\)"  # f(x), P(A), y(0)
    r"|\|[A-Z]{2}\||\[[A-Z]{3,}\]|\\overline\{[A-Z]{2}\}"  # lengths and areas
    r"|[A-Za-z]+(?: ?: ?[A-Za-z]+)+"  # x:y
)
"""The left side of an equation that counts by its right side."""

_UNREADABLE = re.compile(
    r"(?<![_^\d.])\d[\d.]* \d|\.\d*\.|'|\d_|\\approx|dots"
    r"|\\frac\{(?:d|\\partial)[ \w]*\}\{(?:d|\\partial) ?[a-z]"
)
"""What a LaTeX parser would misread: two numbers in a row, two points in one, primes,
subscripts of numbers, approximations, what goes on, derivatives."""

_MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}")
_ENDLESS = re.compile(
    r"\^[{(]*[+-]?\d{6,}|\^[{(]*\d+\^|\^[{(]*\d+!"  # powers that fill the memory
    r"|\d{5,}\)?!|!\)?\}?!"  # factorials of large numbers and of factorials
    r"|\\binom\{?\d{6,}"
)

Expressions = list["tuple[str, str] | Matching"]
"""What is left for math-verify: pairs of expressions, the target's first, and lists to match. The
answer is right if all pairs are equal and all lists match."""

Verdict = bool | Expressions
Matching = list[list[Verdict]]
"""The verdicts of two lists of the same length, a row for each item of the answer. The lists match
if their items can be paired so that each pair is equal."""


def clean(text: str) -> str:
    """One spelling for the many spellings of LaTeX: boxes, fractions, brackets, spaces."""
    while (boxed := boxed_answer(text)) is not None and boxed != text:
        text = boxed
    text = text.strip(" \t\n$").rstrip(" \t\n$\\").removesuffix(".").translate(_CHARACTERS)
    text = re.sub(r"(?<!\\)\$", " ", text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _REPEATING.sub(_as_fraction, text.strip())
    return _THOUSANDS.sub(lambda number: re.sub("[, ]", "", number[0]), text)


def _as_fraction(repeating: re.Match[str]) -> str:
    r"""The fraction of a decimal such as `0.1\overline{6}`."""
    whole, fixed, period = repeating.groups()
    over = 10 ** len(fixed) * (10 ** len(period) - 1)
    value = int(whole + fixed + period) - int("0" + whole + fixed)
    return rf"\frac{{{value}}}{{{over}}}"


def _tight(text: str) -> str:
    """The text without white space, except between two numbers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def normalise(text: str) -> str:
    """The normal form of an answer; answers that differ only in LaTeX spelling have the same."""
    return _tight(clean(text).replace("\\$", "").removesuffix("%").removesuffix("\\"))


def compare(answer: str, target: str) -> Verdict:
    """Whether two answers are equal, or the expressions on which this depends."""
    if answer == target:
        return True
    if len(answer) > MAX_LENGTH:  # before any pattern is tried on it
        return False
    whole = clean(answer)
    (ours, our_unit), (theirs, their_unit) = _without_unit(whole), _without_unit(clean(target))
    if our_unit and their_unit and our_unit != their_unit:
        return False
    unknown = set(our_unit) - set(_UNITS.values())
    is_counted = len(unknown) == 1 and not unknown & {*_AMOUNTS.split()} and len(min(unknown)) > 2
    is_unit = our_unit == their_unit or not unknown or is_counted
    return _compare(ours if is_unit else whole, theirs)


def exact(text: str) -> Fraction | None:
    """The exact number of a text: decimal, ratio, mixed number, power of ten; also in brackets."""
    is_negative = False
    text = _BRACKETED.sub(r"\1\2\3", text)
    while (grouped := _GROUPED.fullmatch(text)) is not None:
        is_negative ^= grouped[1] == "-"
        text = _BRACKETED.sub(r"\1\2\3", grouped[2] or grouped[3] or "")
    if (found := _NUMBER.fullmatch(text)) is None:
        return None
    part = found.groupdict()
    try:
        if part["whole"]:
            value = int(part["whole"]) + Fraction(int(part["part"]), int(part["of"]))
        else:
            value = _plain(part["p"] or part["n"]) / _plain(part["q"] or part["d"] or "1")
    except ZeroDivisionError:
        return None
    return -value if is_negative ^ (found[1] == "-") else value


def _plain(text: str) -> Fraction:
    """The value of a decimal, which may have a power of ten."""
    factor, has_power, exponent = text.partition("10^")
    if not has_power:
        return Fraction(text)
    factor = re.sub(rf"{_TIMES}$", "", factor)
    value = Fraction(factor if factor.strip("+-") else f"{factor}1")
    return value * Fraction(10) ** int(exponent.strip("{}"))


def is_unfinished(answer: str, target: str) -> bool:
    r"""Whether an answer leaves something to do that the target, a number, does not.

    Where the target is a plain number, the answer has to be one: `53*60`, `6!` and `\sqrt{144}` are
    none. Where it is made of numbers, roots, pi, e and i, the answer has to be so too, without a
    sum, product or power of plain numbers that the target has not.
    """
    answer, target = _tight(answer), _tight(target)
    if exact(target) is not None:
        return exact(answer) is None
    if _OF_NUMBERS.fullmatch(target) is None:
        return False
    return _OF_NUMBERS.fullmatch(answer) is None or any(
        kind.search(answer) and not kind.search(target) for kind in _LEFT_TO_DO
    )


def is_endless(text: str) -> bool:
    """Whether an expression is too large to compute, or too deep for an answer, as far as its text
    shows; the checking processes have their own limits."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or _ENDLESS.search(text) is not None


def _without_unit(text: str) -> tuple[str, list[str]]:
    r"""(a quantity without its unit, the unit's words): 12\text{ sq. cm} is 12, [centimeter, 2]."""
    text, money = text.replace("\\$", ""), ["dollar"] if "\\$" in text else []
    found = _UNIT.search(text)
    if found is None:
        return text, money
    words = re.findall(r"[a-z]+", (found[1] or found[2] or found[3]).lower().replace("/", " per "))
    words += [found[4]] if found[4] else []
    unit = [_unit(word) for word in words if not word.startswith("degree")]
    if found[1] is None and not set(unit) <= set(_UNITS.values()):
        return text, money
    unit.sort(key=str.isdigit)  # sq cm is cm^2
    return text[: found.start()], unit if unit[:1] == money else money + unit


def _unit(word: str) -> str:
    """The name of a unit; an unknown word without the s of its plural."""
    stems = word, word.removesuffix("s"), word.removesuffix("es")
    return next((_UNITS[stem] for stem in stems if stem in _UNITS), word.removesuffix("s"))


def _compare(ours: str, theirs: str, *, may_be_unfinished: bool = False) -> Verdict:
    ours, theirs = " ".join(ours.split()), " ".join(theirs.split())
    our_tight, their_tight = _tight(ours), _tight(theirs)
    if not our_tight or our_tight == their_tight:
        return our_tight != ""
    if ours.endswith("%") or theirs.endswith("%"):
        return _compare_percent(ours, theirs)
    a, b = exact(our_tight), exact(their_tight)
    if a is not None and b is not None:
        return a == b
    if (equal := _compare_words(ours, theirs)) is not None:
        return equal
    if (equal := _compare_bases(our_tight, their_tight)) is not None:
        return equal
    (kind, x), (other, y) = _items(ours), _items(theirs)
    if kind and other:
        return _compare_items(kind, x, other, y)
    bare = ours if kind else x[0], theirs if other else y[0]
    if bare != (ours, theirs):  # a set of one item
        return _compare(*bare, may_be_unfinished=may_be_unfinished)
    if (equal := _compare_equations(ours, theirs)) is not None:
        return equal
    if (kind or other)[:1] in ("=", "{", ",") and not re.search(r"\\(?:cup|mp)", ours + theirs):
        return False  # several values are no single value
    if (equal := _compare_ratios(ours, theirs)) is not None:
        return equal
    if is_unfinished(ours, theirs) and not may_be_unfinished:
        return False
    return _ask(ours, theirs)


def _ask(ours: str, theirs: str) -> Verdict:
    """Leave a pair to math-verify, if math-verify can read both."""
    for text in (ours, theirs):
        if _UNREADABLE.search(text) or is_endless(text):
            return False
    return [(theirs, ours)]


def _compare_items(kind: str, ours: Sequence[str], other: str, theirs: Sequence[str]) -> Verdict:
    """Compare two answers that both have items; `_items` has the kinds."""
    if other in ("{}", ",") and (kind in ("{}", ",") or kind[0] == "="):
        return _match(ours, theirs)
    is_named_tuple = "()" in (kind, other) and "=" in kind[0] + other[0]
    return (kind == other or is_named_tuple) and _all_equal(ours, theirs)


def _compare_equations(ours: str, theirs: str) -> Verdict | None:
    """Compare the values of a name. None for two equations of different names, or no equation."""
    (name, x), (their_name, y) = _equation(ours), _equation(theirs)
    has_same_name = name == their_name and name not in ("", "=")
    if not has_same_name and bool(name) == bool(their_name):
        return None
    says_something = all(len(set(map(_tight, sides))) == len(sides) for sides in (x, y))
    pairs = [(a, b) for a in x for b in y]
    ends = any(not is_unfinished(a, b) for a, b in pairs)  # x=2+3=5 does
    if not ends or not (has_same_name or says_something):  # 1=1 says nothing
        return False
    return _all_equal(*zip(*pairs, strict=True), may_be_unfinished=True)


def _compare_words(ours: str, theirs: str) -> bool | None:
    r"""Compare words, whose case does not count. None unless both are letters, and one of them has
    three in a row or is in \text, because `ab` is a product."""
    x, y = _LETTERS.fullmatch(ours), _LETTERS.fullmatch(theirs)
    if x is None or y is None:
        return None
    if not any(found[1] or re.search("[A-Za-z]{3}", found[2]) for found in (x, y)):
        return None
    a, b = x[2], y[2]
    return a.lower() == b.lower() and (a[1:] == b[1:] or len(a) > 3)  # ABC is not abc


def _compare_bases(ours: str, theirs: str) -> bool | None:
    """Compare numbers such as `1010_2`, each with its base. None if neither has one."""
    x, y = _IN_BASE.fullmatch(ours), _IN_BASE.fullmatch(theirs)
    if x is None or y is None:
        return None if x is y else False
    return (x[1].lstrip("0"), x[2]) == (y[1].lstrip("0"), y[2])


def _compare_ratios(ours: str, theirs: str) -> Verdict | None:
    """Compare ratios such as `3:2`, which are no fractions. None if neither is a ratio."""
    x, y = (_split(text, ":") or [text] for text in (ours, theirs))
    if len(x) == 1 == len(y):
        return None
    if len(x) == len(y) and not _TIME.match(theirs):
        x, y = ([rf"\frac{{{a}}}{{{b}}}" for a, b in pairwise(terms)] for terms in (x, y))
    return _all_equal(x, y)


def _compare_percent(ours: str, theirs: str) -> Verdict:
    r"""25\% is 25 and is 0.25."""
    x, y = (re.sub(r"(?:\s*\\?%)+$", "", text) for text in (ours, theirs))
    if (bare := _compare(x, y)) is True or (x == ours) == (y == theirs):
        return bare
    a, b = exact(x), exact(y)
    if a is None or b is None:
        return bare
    return a / 100 == b if y == theirs else a == b / 100


def _all_equal(
    ours: Sequence[str], theirs: Sequence[str], *, may_be_unfinished: bool = False
) -> Verdict:
    """Compare items in order."""
    if len(ours) != len(theirs):
        return False
    undecided: Expressions = []
    for a, b in zip(ours, theirs, strict=True):
        found = _compare(a, b, may_be_unfinished=may_be_unfinished)
        if found is False:
            return False
        undecided += [] if found is True else found
    return undecided or True


def _match(ours: Sequence[str], theirs: Sequence[str]) -> Verdict:
    """Compare items in any order, each as often as it stands."""
    if len(ours) != len(theirs):
        return False
    rest, undecided = list(theirs), list[str]()
    for a in ours:
        equal = next((at for at, b in enumerate(rest) if _compare(a, b) is True), None)
        if equal is None:
            undecided.append(a)
        else:
            del rest[equal]
    rows: Matching = [[_compare(a, b) for b in rest] for a in undecided]
    if any(all(found is False for found in line) for line in [*rows, *zip(*rows, strict=True)]):
        return False  # an item has no equal; math-verify would find the same later
    return [rows] if rows else True


def _distinct(items: Sequence[str]) -> list[str]:
    """The items of a set, in which a number that stands twice counts once."""
    return list({exact(_tight(item)) or _tight(item): item for item in items}.values())


def _items(text: str) -> tuple[str, list[str]]:
    r"""(kind, items) of an answer that has items; ("", [text]) for any other.

    | kind | answer | items |
    | --- | --- | --- |
    | `1x[2]` | a matrix of one row and two columns | entries, row by row |
    | `(]` | `(1, 2]`: a tuple or an interval | in order |
    | `=x,y` | `y=2, x=1` or `(x,y)=(1,2)` | values, in the order of their names |
    | `{}` | `\{1,2\}` | without order |
    | `,` | `1, 2` or `\pm 1` | without order |
    """
    for of_kind in (_matrix, _brackets, _named):
        if (found := of_kind(text)) is not None:
            return found
    is_set = text.startswith("\\{") and text.endswith("\\}")
    items = _split(text[2:-2] if is_set else text) or [""]
    if len(items) == 1 and re.search(r"[|:=]|\\mid", text):
        is_value = is_set and re.fullmatch(r"[^|:=]+=[^|:=]+", items[0])
        return "", items if is_value else [text]  # an equation, or a set by a condition
    items = [value for item in items for value in _signs(item)]
    items = _distinct(items) if is_set else items
    if len(items) == 1 or not all(items):
        return _items(items[0]) if is_set and items[0] else ("", [text])
    return "{}" if is_set else ",", items


def _signs(item: str) -> list[str]:
    r"""The values of an item with `\pm`."""
    if not 0 < len(re.findall(r"\\pm(?![a-z])", item)) < 4:
        return [item]
    return [value for sign in "+-" for value in _signs(item.replace(r"\pm", sign, 1))]


def _named(text: str) -> tuple[str, list[str]] | None:
    """The values of `x=1, y=2` and of `(x,y)=(1,2)`, in the order of their names."""
    pairs = [_equation(item) for item in _split(text) or []]
    tuples = [_brackets(side) for side in _split(text, "=") or []]
    if len(tuples) == 2 and tuples[0] and tuples[1] and len(tuples[0][1]) == len(tuples[1][1]):
        pairs = [(name, [value]) for name, value in zip(tuples[0][1], tuples[1][1], strict=True)]
    values = {name: sides[0] for name, sides in pairs if len(sides) == 1 and _NAME.fullmatch(name)}
    if len(pairs) < 2 or len(values) < len(pairs):
        return None
    return "=" + ",".join(sorted(values)), [values[name] for name in sorted(values)]


def _equation(text: str) -> tuple[str, list[str]]:
    """(name, other sides) of an equation such as `x = 3+4 = 7`; the name is "=" if no side is one.
    ("", [text]) for anything else."""
    sides = _split(re.sub(r"\\in(?![a-z])", "=", text), "=") or [text]
    for name, others in ((sides[0], sides[1:]), (sides[-1], sides[:-1])):
        if others and _NAME.fullmatch(name):
            return _tight(name), others
    return "=" if len(sides) > 1 else "", sides


def _matrix(text: str) -> tuple[str, list[str]] | None:
    """The shape of a matrix and its entries, row by row."""
    found = _MATRIX.fullmatch(text)
    if found is None or "\\begin" in found[1]:
        return None
    rows = [row.split("&") for row in re.sub(r"\\\\\s*$", "", found[1].strip()).split("\\\\")]
    return f"{len(rows)}x{[len(row) for row in rows]}", [entry for row in rows for entry in row]


def _brackets(text: str) -> tuple[str, list[str]] | None:
    """(outer brackets, items) of a tuple or an interval; None for anything else."""
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]":
        return None
    items = _split(text[1:-1])
    return (text[0] + text[-1], items) if items is not None and len(items) > 1 else None


def _split(text: str, separator: str = ",") -> list[str] | None:
    """Split at the separators outside of brackets; None where the brackets do not match."""
    depth, start = 0, 0
    items: list[str] = []
    for at, character in enumerate(text):
        depth += (character in "{([") - (character in "})]")
        if depth < 0:
            return None
        if character == separator and depth == 0:
            items.append(text[start:at].strip())
            start = at + 1
    return None if depth else [*items, text[start:].strip()]
