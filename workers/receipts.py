"""Receipts: counting finished deliveries in their chords, many at once.

Owns: `Receipts`, and what is known of how Celery 5.7 counts a chord's parts (celery/backends/redis.py,
`on_chord_part_return`). Must not know: the pool, engines.
On failure: redis-py's errors are raised; counting twice is harmless, a part counts once.

Celery counts a part in one script call of its own, with some 60 µs of Python around it. Of the parts that finish
together all but the last one of a chord are only *noted* here, by the first half of that script; the last one goes
through Celery, which counts what is noted, and fires the chord's body when it is complete. So whoever comes last fires
it, and all that this module shares with Celery is where a part is noted: `tests/contract/test_celery.py` holds that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import states

if TYPE_CHECKING:
    from collections.abc import Iterable

#: KEYS parts, known parts, done mark; ARGV member, part, member, part … What `CHORD_PART_RETURN_LUA` does with one.
_NOTE = """
if redis.call('GET', KEYS[3]) == 'done' then return end
for i = 1, #ARGV, 2 do
    if redis.call('SADD', KEYS[2], ARGV[i]) == 1 then redis.call('RPUSH', KEYS[1], ARGV[i + 1]) end
end
"""


class Receipts:
    """Counts receipts over the app's result backend. Used by one thread at a time."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._note: Any = None

    def count(self, finished: Iterable[tuple[str, Any, Any]]) -> None:
        """Count deliveries: task id, receipt, and the request's context, each."""
        chords: dict[str, list[tuple[str, Any, Any]]] = {}
        for each in finished:
            context = each[2]
            if context.chord and context.group is not None and context.group_index is not None:
                chords.setdefault(context.group, []).append(each)
        for group, parts in chords.items():
            *others, (task_id, receipt, context) = parts
            if others:
                self._note_parts(group, others)
            # Not a result: those never travel through Celery.
            self._backend.mark_as_done(task_id, receipt, context, store_result=False)

    def _note_parts(self, group: str, parts: list[tuple[str, Any, Any]]) -> None:
        backend = self._backend
        args: list[Any] = []
        for task_id, receipt, context in parts:
            result = backend.encode_result(receipt, states.SUCCESS)
            args += (f"{task_id}:{context.group_index}", backend.encode([1, task_id, states.SUCCESS, result]))
        if self._note is None:
            self._note = backend.client.register_script(_NOTE)
        self._note(keys=[backend.get_key_for_group(group, end) for end in (".j", ".d", ".c")], args=args)
