"""The JSON values of the page: a run, and a trajectory whose token counts are checked."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from agent_loop.records.mask_audit import mask_problems
from agent_loop.records.trajectory_record import TrajectoryRecord
from verl_mixed.views.viewer.index import OUTCOMES, Index
from verl_mixed.views.viewer.tokens import Decode, token_texts

_OF_TREE = ("id", "key", "depth", "cause", "length", "trained")


def run_view(name: str, index: Index, note: str) -> dict[str, Any]:
    """The choices of the filters, and the lines that cannot be read."""
    bad, why = index.unreadable()
    return {
        "name": name,
        "sources": index.counts("source"),
        "outcomes": [*OUTCOMES, *index.counts("stop_reason")],
        "steps": index.steps(),
        "note": note,
        "unreadable": bad,
        "unreadable_why": why,
    }


def trajectory_view(
    identity: str,
    record: TrajectoryRecord,
    decode: Decode | None,
    rows: Sequence[Mapping[str, Any]] = (),
    session_problems: Iterable[str] = (),
) -> dict[str, Any]:
    """A trajectory as the page shows it, or one row of its session.

    Args:
        identity: file and line, `7.13`.
        rows: those of its session, and the problems of the session; see `Index.session`.
    """
    facts = asdict(record)
    counts = counts_of(record)
    problems = [*count_problems(counts), *mask_problems(record)]
    problems += [f"session: {problem}" for problem in session_problems]
    prompt, texts = None, None
    if decode is not None:
        try:
            prompt, whole = decode(record.prompt_ids), decode(record.response_ids)
            texts = token_texts(record.response_ids, decode)
        except Exception as error:  # tokenizers raises plain Exception
            problems.append(f"cannot decode its tokens: {error}; their ids are shown")
        else:
            if "".join(texts) != whole:
                problems.append("tokens decoded one by one differ from the decoded response")
    return {
        "id": identity,
        "group": record.uid,
        **{
            name: _plain(facts[name])
            for name in (
                *("step", "key", "source", "row_id", "draw", "reward", "acc", "advantage"),
                *("stop_reason", "answer", "fault", "fault_tool", "loop_error", "reward_parts"),
                *("state_masking", "response_ids", "response_mask", "log_probs", "weight_versions"),
            )
        },
        "masked": record.why_masked,
        "prompt": prompt,
        "prompt_length": len(record.prompt_ids),
        "tokens": texts,
        "segments": _segments(record),
        "tree": [{name: row[name] for name in _OF_TREE} for row in rows] if len(rows) > 1 else [],
        "counts": counts,
        "problems": problems,
    }


def counts_of(record: TrajectoryRecord) -> dict[str, int]:
    """Numbers of tokens: by author, in the mask, and to be trained."""
    model = sum(s.length for s in record.segments if s.author == "model")
    tool = sum(s.length for s in record.segments if s.author != "model")
    with_mask = model if record.state_masking else len(record.response_ids)
    to_train = 0 if record.why_masked else with_mask
    return {
        "model": model,
        "tool": tool,
        "response": len(record.response_ids),
        "mask_ones": sum(bit == 1 for bit in record.response_mask),
        "to_train": to_train,
    }


def count_problems(counts: Mapping[str, int]) -> list[str]:
    """Counts that contradict each other, as text."""
    problems = []
    if counts["model"] + counts["tool"] != counts["response"]:
        problems.append(
            f"model {counts['model']} + tool {counts['tool']} tokens are not the "
            f"{counts['response']} of the response"
        )
    if counts["mask_ones"] != counts["to_train"]:
        problems.append(
            f"the mask has {counts['mask_ones']} ones where {counts['to_train']} tokens are trained"
        )
    return problems


def _segments(record: TrajectoryRecord) -> list[dict[str, Any]]:
    """The segments with their turns; the times and calls of a turn are in its model segment."""
    calls: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for call in record.calls:
        own = _plain(asdict(call))
        if not call.server_wait_s:
            del own["server_wait_s"]
        calls[call.turn].append(own)
    shown: list[dict[str, Any]] = []
    turn = 0
    for part in record.segments:
        segment: dict[str, Any] = {
            "author": part.author,
            "start": part.start,
            "length": part.length,
        }
        if part.author == "model":
            turn += 1
            if turn <= len(record.turns):
                segment["times"] = _plain(asdict(record.turns[turn - 1]))
            segment["calls"] = calls.pop(turn, [])
        shown.append({**segment, "turn": turn, "text": part.text})
    left = [call for of_turn in calls.values() for call in of_turn]
    if left:  # of turns without a token
        shown.append(
            {"author": "model", "start": len(record.response_ids), "length": 0, "turn": turn + 1}
            | {"text": "", "calls": left}
        )
    return shown


def _plain(value: Any) -> Any:
    """The value with names in place of NaN and infinities, which JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
