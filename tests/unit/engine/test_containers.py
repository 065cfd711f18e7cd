from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch_ckpt import Checkpointer, save_generation


def test_plain_containers_stay_the_same_objects_with_what_was_saved(tmp_path: Path) -> None:
    saved = {
        "place": {"step": 7, "epoch": 1},
        "seen": [1, 2, 3],
        "order": OrderedDict(a=1, b=[2]),
        "deep": {"inner": {"x": 1}},
    }
    save_generation(tmp_path, saved, 7)
    place, seen, order, deep = {"step": 0, "old": True}, [0], OrderedDict(z=0), {"inner": {"x": 0}}
    live: dict[str, Any] = {"place": place, "seen": seen, "order": order, "deep": deep}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.resume(live)
    assert live == saved
    assert live["place"] is place
    assert live["seen"] is seen
    assert live["order"] is order
    assert list(order) == ["a", "b"]
    assert live["deep"] is deep
