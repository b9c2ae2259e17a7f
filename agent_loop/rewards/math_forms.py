r"""Comparison of mathematical answers as text: LaTeX spelling, numbers, lists, brackets. Pure.

Most answers are decided here: the same text, two numbers, tuples of different length. The rest are
pairs of expressions for math-verify. The items of tuples, intervals and matrices are compared one
by one, because math-verify's grammar reads them ten times as fast as the whole.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from samplers.rows.sources.math import boxed_answer

MAX_LENGTH = 2000
"""Longest answer in characters; a longer one is wrong."""

MAX_DEPTH = 30
"""Deepest nesting of brackets that math-verify gets."""

_MOST_EXPONENT = 400
"""Largest exponent of scientific notation that counts as an exact number."""

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
_INEQUALITY = r"[<>]|\\[lgn]eq?(?![a-z])"
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in [
        (r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d)", ""),  # within a number: 58,\!500
        (r"^\\\[(.*)\\\]$", r"\1"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"√\s*(\w+)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|qquad|quad)(?![a-zA-Z])|(?<!\\)\\[,!;:> ]|~", " "),
        (r";\s*$", ""),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])", r"^\\circ"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?(\d+)\^\\circ\)?", r"\1(\\frac{\2\\pi}{180})"),
        (r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|mbox)\s*(?=\{)", r"\\text"),
        (r"\\frac\s*(\d)\s*(?=[\d{])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(\d)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),  # a mixed number
        (r"\s*\\text\s*\{\s*(?:and|or)\s*\}\s*|\s+(?:and|or)\s+", ", "),
        (r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])", r"\1\\times10^{\2}"),
        (r"^(\d+)_\{?10\}?$", r"\1"),  # base ten
        (  # the inequality of \{x|x>0\}
            r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid(?![a-z]))\s*"
            rf"(?=.*\1)([^=]*(?:{_INEQUALITY})[^=]*)\\\}}$",
            r"\2",
        ),
        (r"^\\text\s*\{([^{}]*)\}$|^\(\\text\s*\{([A-Za-z])\}\)$", r"\1\2"),
    ]
]
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,)\]}])")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}")
_UNIT = re.compile(
    r"(?<=[\d}a-z)])\s*(?:\\text\s*\{\s*([^{}\d]+?)s?\.?\s*\}"
    r"|((?:(?<=\d) [mgs]|(?<=\d) ?(?:sq(?:uare)?|cubic|cm|mm"
    r"|km|kg|inch|feet|foot|mile|hour|minute|second|day|year|dollar|cent|unit))"
    r"(?: (?:units?|cm|m|inches|feet|miles))??(?:e?s)?))((?:\s*\^\s*\{?\d\}?)?)\s*$"
)

_DIGITS = r"(?:\d+\.?\d*|\.\d+)"
_NUMBER = re.compile(
    rf"([+-]?)(?:(?P<decimal>{_DIGITS})"
    rf"|(?P<p>{_DIGITS})/(?P<q>{_DIGITS})"
    rf"|\\frac\{{(?P<n>[+-]?{_DIGITS})\}}\{{(?P<d>[+-]?{_DIGITS})\}}"
    r"|(?P<whole>\d+)\\frac\{(?P<part>\d+)\}\{(?P<of>\d+)\}"
    rf"|(?P<m>{_DIGITS})(?:\\times|\\cdot|\*)10\^(?:\{{(?P<e>[+-]?\d{{1,4}})\}}|(?P<e1>\d)))"
)
_IN_BASE = re.compile(r"((?=[A-Z]*\d)[0-9A-Z]+)_\{?(\d+)\}?")
"""A number in a base begins with a digit, because `V_1` is a name."""

_TIME = re.compile(r"\d{1,2}:[0-5]\d")
"""What may be a time is not reduced as a ratio: 2:30 is not 1:15."""

_NUMBERS_OWN = re.compile(r"\\(?:pi|infty|frac|sqrt|cdot|times)")
_UNREADABLE = re.compile(r"(?<![_^\d.])\d[\d.]* \d|\.\d*\.|%|\\text\s*\{[^{}]*\d")
"""Two numbers in a row, two points in one, or a comment, which a LaTeX parser would misread."""

_MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}")
_ENDLESS = re.compile(
    r"\^[{(]*[+-]?\d{6,}|\^[{(]*\d+\^|\^[{(]*\d+!"  # powers that fill the memory
    r"|\d{5,}\)?!|!\)?\}?!"  # factorials of large numbers and of factorials
    r"|\\binom\{?\d{6,}"
)

Expressions = list[tuple[str, str]]
"""Pairs of expressions, the target's first; answer and target are equal if every pair is equal."""


def clean(text: str) -> str:
    """One spelling for the many spellings of LaTeX: boxes, fractions, brackets, spaces."""
    while (boxed := boxed_answer(text)) is not None and boxed != text:
        text = boxed
    text = text.strip(" \t\n$").removesuffix(".").translate(_CHARACTERS)
    text = text.replace("\\$", "").replace("$", " ")
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
    return _tight(clean(text).removesuffix("%").removesuffix("\\"))


def compare(answer: str, target: str) -> bool | Expressions:
    """Whether two answers are equal, or the expressions on which this depends."""
    if answer == target:
        return True
    if len(answer) > MAX_LENGTH:  # before any pattern is tried on it
        return False
    ours, theirs = clean(answer), clean(target)
    if not ours:
        return False
    (ours, our_unit), (theirs, their_unit) = _without_unit(ours), _without_unit(theirs)
    if our_unit and their_unit and our_unit != their_unit:
        return False
    return _compare(ours, theirs)


def exact(text: str) -> Fraction | None:
    """The exact number of a text: decimal, ratio, mixed number, scientific notation."""
    if len(text) > 100 or (found := _NUMBER.fullmatch(text)) is None:
        return None
    part = found.groupdict()
    try:
        if part["decimal"]:
            value = Fraction(part["decimal"])
        elif part["p"]:
            value = Fraction(part["p"]) / Fraction(part["q"])
        elif part["n"]:
            value = Fraction(part["n"]) / Fraction(part["d"])
        elif part["whole"]:
            value = int(part["whole"]) + Fraction(int(part["part"]), int(part["of"]))
        else:
            exponent = int(part["e"] or part["e1"])
            if abs(exponent) > _MOST_EXPONENT:
                return None
            value = Fraction(part["m"]) * Fraction(10) ** exponent
    except ZeroDivisionError:
        return None
    return -value if found[1] == "-" else value


def is_endless(text: str) -> bool:
    """Whether an expression is too large to compute, or too deep for an answer, as far as its text
    shows; the checking processes have their own limits."""
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or _ENDLESS.search(text) is not None


def _without_unit(text: str) -> tuple[str, str]:
    r"""(a quantity without degrees and unit, the unit): "12\text{ cm}^2" is 12, "cm2"."""
    text = re.sub(r"\^\\circ$|\s*degrees?$", "", text)
    found = _UNIT.search(text)
    if found is None or not found.start():
        return text, ""
    unit = (found[1] or found[2]) + found[3]
    unit = re.sub(r"[\s{}^]", "", unit.lower())
    return text[: found.start()], re.sub(r"(?<=[a-z]{2})e?s?(?=\d*$)", "", unit)  # no plural


def _compare(ours: str, theirs: str) -> bool | Expressions:
    ours, theirs = re.sub(r"\s+", " ", ours).strip(), re.sub(r"\s+", " ", theirs).strip()
    our_tight, their_tight = _tight(ours), _tight(theirs)
    if not our_tight or our_tight == their_tight:
        return our_tight != ""
    if ours.endswith("%") or theirs.endswith("%"):
        return _compare_percent(ours, theirs)
    a, b = exact(our_tight), exact(their_tight)
    if a is not None and b is not None:
        return a == b
    if _is_word(ours) and _is_word(theirs):
        return ours.lower() == theirs.lower()
    if (based := _compare_bases(our_tight, their_tight)) is not None:
        return based
    if _UNREADABLE.search(ours) or _UNREADABLE.search(theirs):
        return False
    for ordered in (_matrix, _brackets):
        x, y = ordered(ours), ordered(theirs)
        if x is not None and y is not None:
            return x[0] == y[0] and _all_equal(x[1], y[1])
    if (x := _listed(ours)) is not None and (y := _listed(theirs)) is not None:
        return _equal_sets(ours, theirs, x, y)
    for one, other in ((ours, theirs), (theirs, ours)):
        is_points = _listed(one) is not None and not re.search(rf"=|{_INEQUALITY}", one)
        if is_points and (_brackets(other) is not None or re.search(_INEQUALITY, other)):
            return False  # points without an order are no tuple and no interval
    if "=" not in theirs and x is None and (values := _values(ours)) != [ours]:
        says_something = len(set(map(_tight, values))) == len(values)  # 1=1 does not
        return says_something and _all_equal(values, [theirs] * len(values))
    if (ratios := _compare_ratios(ours, theirs)) is not None:
        return ratios
    if is_endless(ours) or is_endless(theirs):
        return False
    return [(theirs, ours)]


def _compare_bases(ours: str, theirs: str) -> bool | None:
    """Compare numbers such as `1010_2`, each with its base. None if neither has one."""
    x, y = _IN_BASE.fullmatch(ours), _IN_BASE.fullmatch(theirs)
    if x is None or y is None:
        return None if x is y else False
    return x.groups() == y.groups()


def _compare_ratios(ours: str, theirs: str) -> bool | Expressions | None:
    """Compare ratios such as `3:2`, which are no fractions. None if neither is a ratio."""
    x, y = (_split(text, ":") or [text] for text in (ours, theirs))
    if "=" in theirs or len(x) == 1 == len(y):
        return None
    if len(x) == len(y) and not _TIME.match(theirs):
        x, y = ([rf"\frac{{{a}}}{{{b}}}" for a, b in pairwise(terms)] for terms in (x, y))
    return _all_equal(x, y)


def _values(text: str) -> list[str]:
    """The parts of an answer such as `x = 3 + 4 = 7`, without the name in front."""
    parts = [part.strip() for part in re.split(r"(?<![<>!\\])=", text)]
    is_named = re.search(r"[A-Za-z]", _NUMBERS_OWN.sub("", parts[0])) is not None
    return parts[1:] if is_named and len(parts) > 1 else parts


def _compare_percent(ours: str, theirs: str) -> bool | Expressions:
    r"""25\% is 25 and is 0.25."""
    x, y = (re.sub(r"(?:\s*\\?%)+$", "", text) for text in (ours, theirs))
    if (bare := _compare(x, y)) is True or (x == ours) == (y == theirs):
        return bare
    a, b = exact(x), exact(y)
    if a is None or b is None:
        return bare
    return a / 100 == b if y == theirs else a == b / 100


def _is_word(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,}", text) is not None


def _all_equal(ours: Sequence[str], theirs: Sequence[str]) -> bool | Expressions:
    """Compare items in order."""
    if len(ours) != len(theirs):
        return False
    open_pairs: Expressions = []
    for a, b in zip(ours, theirs, strict=True):
        found = _compare(a, b)
        if found is False:
            return False
        open_pairs += [] if found is True else found
    return open_pairs or True


def _equal_sets(
    whole: str, whole_target: str, ours: Sequence[str], theirs: Sequence[str]
) -> bool | Expressions:
    """Compare items in any order; math-verify pairs the items that are undecided."""
    verdicts = [[_compare(a, b) for b in theirs] for a in ours]
    columns = list(zip(*verdicts, strict=True))
    if any(all(v is False for v in line) for line in [*verdicts, *columns]):
        return False  # an item without its like
    if all(True in line for line in [*verdicts, *columns]):
        return True
    if is_endless(whole) or is_endless(whole_target):
        return False
    return [(whole_target, whole)]


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


def _listed(text: str) -> list[str] | None:
    r"""The items of `\{1,2\}` and of `1, 2`; None for a single item without braces."""
    is_set = text.startswith("\\{") and text.endswith("\\}")
    items = _split(text[2:-2] if is_set else text)
    return items if items is not None and (is_set or len(items) > 1) and all(items) else None


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
