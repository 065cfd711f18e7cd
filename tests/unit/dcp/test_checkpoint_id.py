"""What an id names, and what is no id."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_ckpt import ConfigError
from torch_ckpt.dcp.checkpoint_id import Wanted, parse_checkpoint_id, to_write


@pytest.mark.parametrize(
    ("checkpoint_id", "folder", "step"),
    [
        (500, None, 500),
        ("500", None, 500),
        (0, None, 0),
        ("step-500", "step-500", 500),
        ("step_0000000500", "step_0000000500", 500),
        ("epoch=3-step=700.ckpt", "epoch=3-step=700.ckpt", 700),
        ("iter00042", "iter00042", 42),
        (Path("step-500"), "step-500", 500),
        ("best", "best", None),
        ("v2-final-3", "v2-final-3", None),
    ],
)
def test_a_step_or_a_name_is_understood(
    checkpoint_id: object, folder: str | None, step: int | None
) -> None:
    assert parse_checkpoint_id(checkpoint_id, "/runs/7") == Wanted(folder, step)


@pytest.mark.parametrize(
    "spelling", ["{root}/step-500", "{root}//step-500/", "file://{root}/step-500"]
)
def test_a_path_in_the_root_is_its_folder(tmp_path: Path, spelling: str) -> None:
    wanted = parse_checkpoint_id(spelling.format(root=tmp_path), str(tmp_path))
    assert wanted == Wanted("step-500", 500)


def test_a_relative_path_and_a_link_lead_to_the_root_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs" / "checkpoint").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    root = str(tmp_path / "outputs" / "checkpoint")
    for text in ("outputs/checkpoint/step-500", Path("link/checkpoint/step-500")):
        assert parse_checkpoint_id(text, root) == Wanted("step-500", 500)


@pytest.mark.parametrize("url", ["s3://b/run/step-9", "s3a://b/run//step-9/"])
def test_a_url_in_the_root_is_its_folder(url: str) -> None:
    assert parse_checkpoint_id(url, "s3://b/run/") == Wanted("step-9", 9)


@pytest.mark.parametrize(
    "checkpoint_id",
    [-1, 1.5, 1 << 62, True, "", "..", "a/..", "/", None, b"step-5", "else/step-5"],
)
def test_what_is_no_id_is_refused(checkpoint_id: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_checkpoint_id(checkpoint_id, "/runs/7")
    assert "\n" not in str(caught.value)


def test_a_save_needs_a_step_and_gives_its_folder_the_usual_name() -> None:
    assert to_write(Wanted(None, 500)) == ("step-0000000500", 500)
    assert to_write(Wanted("step-500", 500)) == ("step-500", 500)
    with pytest.raises(ConfigError, match="'best' does not say its step"):
        to_write(Wanted("best", None))
