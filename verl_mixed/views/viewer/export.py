"""The viewer as one file: the same page with its trajectories inside, and no server.

Everything it may run is named by hash in its policy; the trajectories are text in a data block,
with every `<` written as an escape, so that none of it can end the block.
"""

import base64
import hashlib
import json
from html import escape
from typing import Any

from verl_mixed.views.viewer.filters import Filter
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.server import PAGE
from verl_mixed.views.viewer.tokens import Decode
from verl_mixed.views.viewer.views import row_view, run_view, trajectory_view

_STYLE = '<link rel="stylesheet" href="viewer.css">'
_SCRIPTS = {
    name: f'<script src="{name}" defer></script>\n'
    for name in ("filter.js", "tokens.js", "viewer.js")
}
"""In index.html, by file."""


def page_of(
    name: str, index: Index, decode: Decode | None, note: str, chosen: Filter, most: int
) -> tuple[str, int, int]:
    """The page with the trajectories that are meant.

    Args:
        name: of the run.
        index: its trajectories.
        decode: its tokenizer; None shows ids.
        note: what to say where there is none.
        chosen: which are meant.
        most: how many of them, the first.

    Returns:
        HTML, how many are in it, and how many were meant.
    """
    total = index.count(chosen)
    rows = index.rows(chosen, limit=most)
    shown: dict[str, Any] = {}
    unreadable = 0
    for row in rows:
        try:
            shown[row.id] = trajectory_view(row.id, index.record(row.id), decode)
        except (OSError, ValueError):
            unreadable += 1
    run = run_view(name, index, note)
    run["unreadable"] += unreadable
    which = f" ({meant})" if (meant := str(chosen)) else ""
    run["exported"] = f"{len(shown)} of {total} trajectories{which}"
    data = {
        "run": run,
        "rows": [row_view(row) for row in rows if row.id in shown],
        "trajectories": shown,
    }
    return _assemble(name, data), len(shown), total


def _assemble(name: str, data: dict[str, Any]) -> str:
    css = (PAGE / "viewer.css").read_text(encoding="utf-8")
    script = "".join((PAGE / file).read_text(encoding="utf-8") for file in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    block = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        block = block.replace(sign, f"\\u{ord(sign):04x}")
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    head, tail = page.split(_STYLE)
    for tag in _SCRIPTS.values():
        tail = tail.replace(tag, "")
    head = head.replace("<title>Trajectories</title>", f"<title>{escape(name)}</title>")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    before_end, end = tail.split("</body>")
    return (
        f"{head}{meta}<style>{css}</style>{before_end}"
        f'<script type="application/json" id="data">{block}</script>'
        f"<script>{script}</script></body>{end}"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
