"""The code in a model's answer: what stands between the fences of Markdown.

As SandboxFusion's `POST /submit` finds it.
"""

import re

_FENCED = re.compile(r"```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NAMES = {
    "cpp": {"cpp", "c++", "cc"},
    "nodejs": {"nodejs", "javascript", "js", "node"},
    "python": {"python", "py", "python3"},
    "bash": {"bash", "sh", "shell"},
}


def extract_code(completion: str, language: str) -> str:
    """The last fenced block in this language; else the last without one; else all of it."""
    blocks = [(name.lower(), code) for name, code in _FENCED.findall(completion)]
    wanted = _NAMES.get(language, {language.lower()})
    for names in (wanted, {""}):
        for name, code in reversed(blocks):
            if name in names:
                return code.strip("\n")
    return completion if not blocks else blocks[-1][1].strip("\n")
