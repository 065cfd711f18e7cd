"""A save into a folder of another kind of place does not take the root's options along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.s3.servers import KEY, REGION, SECRET, Server
from torch_ckpt import Checkpointer
from torch_ckpt.errors import ConfigError
from torch_ckpt.storage.store import open_beside


def test_a_bucket_is_not_told_the_options_of_a_local_root(
    tmp_path: Path, moto_server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server.endpoint_url)
    folder = f"s3://{moto_server.bucket}/{prefix}/own-name"
    with Checkpointer(tmp_path, storage_options={"stripe_count": 2}) as checkpointer:
        saved = checkpointer.save({"a": torch.arange(5)}, 3, folder=folder).wait("committed", 60)
        assert saved is not None
        assert saved.url == folder
        state = {"a": torch.zeros(5, dtype=torch.int64)}
        assert checkpointer.load(state, folder=folder).step == 3
    assert torch.equal(state["a"], torch.arange(5))


def test_a_local_folder_is_not_told_the_options_of_a_bucket(tmp_path: Path) -> None:
    secret = {"key": "me", "secret": "mine"}
    assert open_beside(tmp_path, "s3://bucket/run", secret).url == str(tmp_path)
    assert open_beside("memory://run", "s3://bucket/run", secret).url == "memory://run"


def test_a_place_of_the_same_kind_is_told_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stripe_count"):
        open_beside(tmp_path, "/lustre/run", {"stripe_count": 0})
