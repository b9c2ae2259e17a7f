r"""The answer in a `\boxed{}`, of a solution or of what a model wrote."""

import re

_BOX = re.compile(r"\\(?P<box>boxed|fbox)(?![A-Za-z])\s*(?P<open>\{)?|\\.|[{}]", re.DOTALL)
"""Boxes, braces, and escaped characters, which are neither."""

_WORD = re.compile(r"[^\s$]+")


def boxed_answer(solution: str) -> str | None:
    r"""Content of the last `\boxed{}` or `\fbox{}` whose braces balance and hold something.

    `\boxed 7` without braces holds what follows up to the next `$` or white space. Braces behind a
    backslash are characters of the answer. None without such a box.
    """
    last, answer = -1, None
    opened: list[re.Match[str] | None] = []  # each open brace's box, None for other braces
    for token in _BOX.finditer(solution):
        box, content = None, ""
        if token["open"]:
            opened.append(token)
        elif token["box"]:
            box, word = token, _WORD.match(solution, token.end())
            content = word.group() if word else ""
        elif token.group() == "{":
            opened.append(None)
        elif token.group() == "}" and opened:
            box = opened.pop()
            content = solution[box.end() : token.start()].strip() if box else ""
        if box and content and box.start() > last:
            last, answer = box.start(), content
    return answer
