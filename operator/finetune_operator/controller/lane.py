"""Keys that wait, of which the namespaces take turns: a namespace with many keys does not delay those of the others."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

# When it is the turn of a namespace; the smallest comes next. First the number of its last turn, 0 if it had none, so that the namespace whose
# last turn is the longest ago comes next; then the order in which namespaces without a turn began to wait; then the namespace.
_Turn = tuple[int, int, str]


def get_namespace(key: str) -> str:
    """The namespace of a key."""
    return key.partition("/")[0]


@dataclass
class Lane:
    """The keys in the order of their addition, within the namespace of each."""

    _keys: dict[str, OrderedDict[str, None]] = field(default_factory=dict)
    """By namespace in `_turns`. A namespace whose keys were all removed stays until its turn."""
    _turns: list[_Turn] = field(default_factory=list)
    """A heap with one turn for each namespace that waits."""
    _last_turns: dict[str, int] = field(default_factory=dict)
    """By namespace; also of namespaces without keys, as long as others wait. Otherwise one that comes back at once would always be next."""
    _number: int = 0
    """Of the last turn or arrival."""

    def append(self, key: str) -> None:
        """Add a key that does not wait yet."""
        namespace = get_namespace(key)
        keys = self._keys.get(namespace)
        if keys is None:
            keys = self._keys[namespace] = OrderedDict()
            self._number += 1
            heapq.heappush(self._turns, (self._last_turns.get(namespace, 0), self._number, namespace))
        keys[key] = None

    def remove(self, key: str) -> None:
        """Remove a key that waits."""
        del self._keys[get_namespace(key)][key]

    def pop(self, excluded: Collection[str] = ()) -> str | None:
        """Remove the next key, and return it; None if no key waits.

        Args:
            excluded: namespaces whose keys stay, as do their turns.
        """
        skipped: list[_Turn] = []
        key = None
        while self._turns and key is None:
            namespace = self._turns[0][-1]
            if not self._keys[namespace]:
                self._remove_namespace(namespace)
            elif namespace in excluded:
                skipped.append(heapq.heappop(self._turns))
            else:
                key = self._pop_of(namespace)
        for turn in skipped:
            heapq.heappush(self._turns, turn)
        if not self._turns:
            self.clear()
        return key

    def clear(self) -> None:
        """Remove all keys, and forget the turns."""
        for collection in (self._keys, self._turns, self._last_turns):
            collection.clear()
        self._number = 0

    def _pop_of(self, namespace: str) -> str:
        """Remove the first key of the namespace whose turn it is, and return the key. The turn is over then."""
        keys = self._keys[namespace]
        key, _ = keys.popitem(last=False)
        self._number += 1
        self._last_turns[namespace] = self._number
        if keys:
            heapq.heapreplace(self._turns, (self._number, 0, namespace))
        else:
            self._remove_namespace(namespace)
        return key

    def _remove_namespace(self, namespace: str) -> None:
        """Remove the namespace whose turn it is."""
        heapq.heappop(self._turns)
        del self._keys[namespace]
