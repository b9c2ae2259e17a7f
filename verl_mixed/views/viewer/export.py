"""The viewer as one HTML file: the same page with its trajectories inside, and no server.

The policy of the page names its script and its style by hash, so nothing else runs. The
trajectories are a JSON block in which every `<` is an escape, so no text can end the block.
"""

import base64
import hashlib
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from verl_mixed.views.viewer.filters import Filter
from verl_mixed.views.viewer.index import Index
from verl_mixed.views.viewer.server import PAGE, SCRIPTS, TEMPLATE
from verl_mixed.views.viewer.tokens import Decode
from verl_mixed.views.viewer.views import run_view, trajectory_view


def page_of(
    name: str, index: Index, decode: Decode | None, note: str, chosen: Filter, most: int
) -> tuple[str, int, int]:
    """The page with the first `most` trajectories of a run that a filter chooses, with all rows.

    `decode` and `note` are those of `tokenizer_of`.

    Returns:
        (HTML, trajectories in the page, trajectories that the filter chooses).
    """
    total = index.count(chosen)
    rows = index.rows(chosen, limit=most)
    shown: dict[str, Any] = {}
    sessions: dict[str, tuple[list[dict[str, Any]], list[str]]] = {}
    unreadable = 0
    for row in rows:
        session, identity = row["session"], row["id"]
        try:
            if session not in sessions:
                sessions[session] = index.session(session)
            record = index.record(identity)
            shown[identity] = trajectory_view(identity, record, decode, *sessions[session])
        except (OSError, ValueError):
            unreadable += 1
    run = run_view(name, index, note)
    run["unreadable"] += unreadable
    which = f" ({filtered})" if (filtered := str(chosen)) else ""
    rows = [row for row in rows if row["id"] in shown]
    trajectories = len({row["session"] for row in rows})
    run["exported"] = f"{trajectories} of {total} trajectories{which}"
    data = {"run": run, "rows": rows, "trajectories": shown}
    return _assemble(name, data), trajectories, total


def _assemble(name: str, data: dict[str, Any]) -> str:
    css = (PAGE / "viewer.css").read_text(encoding="utf-8")
    script = "".join((PAGE / file).read_text(encoding="utf-8") for file in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(css)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    block = htmlsafe_json_dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return TEMPLATE.render(title=name, policy=policy, css=css, script=script, data=block)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
