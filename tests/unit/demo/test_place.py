"""What the demo asks of a machine before it starts."""

from __future__ import annotations

import pytest

from demo.kubectl import DemoError
from demo.place import GIB, check_disk


@pytest.mark.parametrize(
    ("free", "first_time", "wanted"), [(1, False, "14.0"), (13, False, "14.0"), (20, True, "26.0")]
)
def test_nearly_full_disk_is_refused_before_pods_stay_pending(
    free: int, first_time: bool, wanted: str
) -> None:
    with pytest.raises(DemoError, match=rf"has {free}\.0 GiB free, and a local cluster needs {wanted} GiB"):
        check_disk(100 * GIB, free * GIB, first_time=first_time)


def test_disk_with_room_is_taken() -> None:
    check_disk(100 * GIB, 20 * GIB, first_time=False)
    check_disk(100 * GIB, 27 * GIB, first_time=True)
