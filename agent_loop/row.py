"""A row of a dataset, from the dataset to the agent loop.

verl adapter: the columns of trainer/ppo/v1/agent_loop_tq.py at 0.9.1.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What verl carries in columns: those of the dataset, and those of a session of the row."""

    source: str
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt, in the template of the source."""

    row_id: str = ""
    agent: str | None = None
    """Name of its agent loop; None: `rollout.agent.default_agent_loop`."""

    rollout_n: int | None = None
    """Trajectories of its group; None: `rollout.n`."""

    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    uid: str = ""
    """Of its group."""

    session: int | str = 0
    """Number of the session in its group; `greedy` for the baseline of `remax`."""

    global_steps: int | None = None
    """Training step that it was drawn for."""

    step_deadline: float | None = None
    """When the step's time is over, on the clock of `time.monotonic`; None without a limit."""

    came: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """All columns, as they came: those of the fields above, and those of others' loops."""

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> "Row":
        """The row of verl's columns.

        Raises:
            KeyError: there is no `data_source`.
        """
        info = columns.get("extra_info") or {}
        messages = columns.get("raw_prompt")
        return cls(
            source=columns["data_source"],
            messages=() if messages is None else messages,
            row_id=info.get("row_id") or columns.get("row_id") or "",
            agent=columns.get("agent_name"),
            rollout_n=columns.get("__rollout_n__"),
            extra_info=info,
            uid=columns.get("uid", ""),
            session=columns.get("session_id", 0),
            global_steps=columns.get("global_steps"),
            step_deadline=columns.get("step_deadline"),
            came=columns,
        )

    def columns(self) -> dict[str, Any]:
        """The columns that came, with the dataset's fields as they are now."""
        own: dict[str, Any] = {"data_source": self.source, "raw_prompt": self.messages}
        if self.row_id:
            own["row_id"] = self.row_id
        if self.agent is not None:
            own["agent_name"] = self.agent
        if self.rollout_n is not None:
            own["__rollout_n__"] = self.rollout_n
        return {**self.came, **own}

    @property
    def extras(self) -> dict[str, Any]:
        """The row's own fields, as a new object.

        Raises:
            ValueError: `extra_info.extras` is no JSON.
        """
        return json.loads(self.extra_info.get("extras") or "{}")

    @property
    def ground_truth(self) -> Any:
        """What a reward compares with, as a new object.

        Raises:
            ValueError: `reward_model.ground_truth` is no JSON.
        """
        return json.loads(self.came["reward_model"]["ground_truth"])

    @property
    def question(self) -> str:
        """The text of the last user message; of a message with images, its texts."""
        asked = [message["content"] for message in self.messages if message["role"] == "user"]
        content = asked[-1] if asked else ""
        if isinstance(content, str):
            return content
        return "\n".join(part["text"] for part in content if part.get("type") == "text")

    def visible(self) -> dict[str, Any]:
        """What tools with state and agents may see of the row; the ground truth is not in it.

        Returns:
            `data_source`, `row_id`, `prompt` (messages) and `extras`.
        """
        return {
            "data_source": self.source,
            "row_id": self.row_id or None,
            "prompt": [dict(message) for message in self.messages],
            "extras": self.extras,
        }
