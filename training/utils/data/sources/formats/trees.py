"""Conversation trees, one message a row, as conversations: OASST's `message_id`, `parent_id`, `role` and `text`.

Each message of the assistant becomes a row: the messages from the root of its tree to it. Messages of the assistant
before it are other rows, so that here they carry no loss (see `weights`): each is learnt once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import FileRow, Kinds, kind_of

_ID, _PARENT, _ROLE, _TEXT = "message_id", "parent_id", "role", "text"
_ROLES = {"prompter": "user"}
_ASSISTANT = "assistant"


def holds_trees(kinds: Kinds) -> bool:
    """True if a file with these columns holds one message a row."""
    return all(column in kinds for column in (_ID, _PARENT, _ROLE, _TEXT))


class TreeRows(Sequence):
    """The conversations in such rows, each built when it is read.

    Messages marked as `deleted`, and those below them, are left out. The constructor reads all rows once. It raises
    ThreestepError for a message without a role, without an id or with another's, and where a parent is missing or
    follows from itself.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.nulls = rows.nulls
        self.kinds: Kinds = {column: kinds for column, kinds in rows.kinds.items() if column not in (_ROLE, _TEXT)}
        self.kinds["messages"] = {"a list": next(iter(rows.kinds[_TEXT].values()), "the file")}
        places: dict[Any, int] = {}
        answers, deleted = [], set()
        for place in range(len(rows)):
            row = rows[place]
            if not isinstance(row.get(_ID), (str, int)) or row[_ID] in places:
                wrong = f"{row.get(_ID)!r:.60}" + (" a second time" if isinstance(row.get(_ID), (str, int)) else "")
                raise ThreestepError(f"{row.where}: column '{_ID}': expected an id of its own, got {wrong}")
            if not isinstance(row.get(_ROLE), str):
                raise ThreestepError(f"{row.where}: column '{_ROLE}': expected text, got {kind_of(row.get(_ROLE))}")
            places[row[_ID]] = place
            answers += [place] if row[_ROLE] == _ASSISTANT else []
            deleted |= {place} if row.get("deleted") is True else set()
        self._parents = [self._parent_of(place, places) for place in range(len(rows))]
        self._answers = [place for place in answers if deleted.isdisjoint(self._path(place))]

    def _parent_of(self, place: int, places: dict[Any, int]) -> int | None:
        row = self._rows[place]
        parent = row.get(_PARENT)
        if parent in (None, ""):
            return None
        if not isinstance(parent, (str, int)) or parent not in places:
            raise ThreestepError(
                f"{row.where}: column '{_PARENT}': expected the id of a message in the same files, got {parent!r:.60}; "
                "give all messages of a tree, or none"
            )
        return places[parent]

    def _path(self, place: int) -> Iterator[int]:
        """A message and those before it, from the last to the first."""
        at: int | None = place
        seen: set[int] = set()
        while at is not None:
            if at in seen:
                raise ThreestepError(f"{self._rows[place].where}: the message follows from itself by '{_PARENT}'")
            seen.add(at)
            yield at
            at = self._parents[at]

    @property
    def sentence(self) -> str:
        """Counts of messages and answers, for a log."""
        return f"conversation trees ({len(self._rows):,} messages, {len(self):,} of them answers, each with its prompt)"

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: Any) -> Any:
        path = [self._rows[place] for place in self._path(self._answers[int(index)])][::-1]
        messages = [{"role": _ROLES.get(row[_ROLE], row[_ROLE]), "content": row.get(_TEXT)} for row in path]
        for message in messages[:-1]:
            if message["role"] == _ASSISTANT:
                message["train"] = False
        answer = path[-1]
        rest = {column: value for column, value in answer.items() if column not in (_ROLE, _TEXT)}
        return FileRow({**rest, "messages": messages}, answer.where)
