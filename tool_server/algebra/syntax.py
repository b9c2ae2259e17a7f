"""Parser of typed mathematics into a Python syntax tree: `2x+3=7`, `5!`, `|x-1|`, `30°`, `x->0`.

It adds the products that people leave out, as in `2x`, and finds where an operand ends. It does not
evaluate anything and gives names no meaning. It does not accept LaTeX.
"""

import ast
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tool_server.calculator import CalculationError

MAX_LENGTH = 2000
"""Characters of an expression."""

MAX_DEPTH = 100
"""Depth of nested brackets; Python's own parser fails at 200."""

_SPELLED = str.maketrans(
    {
        "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2217": "*", "\u00f7": "/",
        "\u2212": "-", "\u2013": "-", "≤": "<=", "≥": ">=",
        "→": "->", "π": " pi ", "∞": " oo ", "²": "**2", "³": "**3", "{": "(", "}": ")",
        "\t": " ", "\r": " ", "\xa0": " ",
    }
)  # fmt: skip
_TOKEN = re.compile(
    r"(?P<space>[ ]+)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![\w.]))?)"
    r"|(?P<name>[^\W\d]\w*)"
    r"|(?P<postfix>!!|!(?!=)|°)"
    r"|(?P<separator>->|[,;\n])"
    r"|(?P<operator>\*\*|//|==|<=|>=|[-+*/^%=<>])"
    r"|(?P<bracket>[()\[\]|])"
)
_PYTHON = {"^": "**", "=": "=="}
_POSTFIX = {"!": "factorial", "!!": "factorial2", "°": "rad"}
_THOUSANDS = re.compile(r",([0-9]{3})(?![0-9])")


def parse(text: str, functions: Collection[str], constants: Collection[str]) -> ast.expr:
    """The syntax tree of an expression.

    Args:
        text: the typed text; `,`, `;`, `and` or a line break separates equations.
        functions: names that take arguments; any other name before a bracket is a factor.
        constants: further known names. Two or three letters that are not a known name are a
            product, as in `2xy`.

    Raises:
        CalculationError: the text is not an expression; the message says what is wrong.
    """
    if len(text) > MAX_LENGTH:
        raise CalculationError(f"expression longer than {MAX_LENGTH} characters")
    if "\\" in text or "$" in text:
        raise CalculationError("LaTeX is not understood: write it as in (x^2+1)/sqrt(2)")
    shown = text.strip()
    typed = shown.translate(_SPELLED).rstrip("=?. ")
    python = _Writer(functions, frozenset(functions) | frozenset(constants)).write(typed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Python about its own syntax
            return ast.parse(python, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CalculationError(f"not an expression: {shown[:100]!r}") from error


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, token, index of its end), without spaces."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise CalculationError(f"not understood: {text[at : at + 20]!r}")
        at = match.end()
        if match.lastgroup != "space":
            yield match.lastgroup, match.group(), at


@dataclass(slots=True)
class _Writer:
    """Writes an expression as Python, token by token."""

    functions: Collection[str]
    known: Collection[str]
    out: list[str] = field(default_factory=list)
    opened: list[tuple[str, int, bool]] = field(default_factory=list)
    """Open brackets: (closing bracket, index where the operand began, whether commas separate
    arguments)."""

    operand: int | None = None
    """Index in `out` where the operand before this token began; None if an operand must follow."""

    def write(self, text: str) -> str:
        skip_to, callee = 0, False
        for kind, token, end in _tokens(text):
            if end <= skip_to:
                continue
            if callee and token != "(":
                raise CalculationError(f"{self.out[-1]} needs brackets, as in {self.out[-1]}(x)")
            was_callee, callee = callee, False
            if kind == "number":
                if self.operand is not None and self.out[-1][-1].isalnum():
                    raise CalculationError(f"{self.out[-1]} {token}: an operator is missing")
                self._operand(token)
            elif token == "and":
                self._separate()
            elif token == "mod" and self.operand is not None:
                self._operator("%")
            elif kind == "name":
                for word in self._words(token):
                    self._operand(word)
                callee = token in self.functions
            elif kind == "postfix":
                self._postfix(token)
            elif kind == "separator":
                grouped = _THOUSANDS.match(text, end - 1)
                if grouped and self.out and self.out[-1].isdigit() and not self._parts_arguments():
                    self.out[-1] += grouped.group(1)
                    skip_to = grouped.end()
                else:
                    self._separate()
            elif kind == "operator":
                self._operator(_PYTHON.get(token, token))
            else:
                self._bracket(token, was_callee)
        if callee:
            raise CalculationError(f"{self.out[-1]} needs brackets, as in {self.out[-1]}(x)")
        if self.opened:
            raise CalculationError(f"a {self.opened[-1][0]!r} is missing")
        return " ".join(self.out).rstrip(", ")

    def _words(self, name: str) -> list[str]:
        if name in self.known or len(name) > 3 or not name.isalpha():
            return [name]
        return list(name)

    def _operand(self, *tokens: str) -> None:
        self._times()
        self.operand = len(self.out)
        self.out += tokens

    def _times(self) -> None:
        """Add `*` if an operand follows an operand."""
        if self.operand is not None:
            self.out.append("*")

    def _operator(self, token: str) -> None:
        self.out.append(token)
        self.operand = None

    def _separate(self) -> None:
        if self.operand is not None:  # an empty line, or `;` after `,`
            self._operator(",")

    def _parts_arguments(self) -> bool:
        return any(parts for _, _, parts in self.opened)

    def _postfix(self, token: str) -> None:
        if self.operand is None:
            raise CalculationError(f"nothing stands before {token!r}")
        self.out.insert(self.operand, f"{_POSTFIX[token]}(")
        self.out.append(")")

    def _bracket(self, token: str, callee: bool) -> None:
        closes = self.opened[-1][0] if self.opened else ""
        if token in ")]" or (token == closes == "|" and self.operand is not None):
            if token != closes:
                raise CalculationError(f"{token!r} closes nothing")
            _, began, _ = self.opened.pop()
            self.out.append(")" if token == "|" else token)
            self.operand = began
            return
        if len(self.opened) == MAX_DEPTH:
            raise CalculationError(f"brackets nested deeper than {MAX_DEPTH}")
        if callee and self.operand is not None:
            began = self.operand
        else:
            self._times()
            began = len(self.out)
        closer = {"(": ")", "[": "]"}.get(token, "|")
        self.opened.append((closer, began, callee or token == "["))
        self.out += ["abs", "("] if token == "|" else [token]
        self.operand = None
