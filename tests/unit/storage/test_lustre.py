"""Striping on Lustre: asked of `lfs` where the mounts table says so, and never needed for a save.

There is no Lustre here: a program named `lfs` notes what it is told, and a table says what is
mounted.
"""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
import torch

from torch_ckpt import Checkpointer
from torch_ckpt.errors import ConfigError
from torch_ckpt.storage import lustre
from torch_ckpt.storage.store import Store, open_store

PACKAGES = ("torch_ckpt", "lightning_ckpt", "accelerate_ckpt")
GROWING = "-E 1G -c 1 -E 100G -c 4 -S 16777216 -E -1 -c 8 -S 16777216"


class Site:
    """A machine on which some folder is a Lustre, and what its `lfs` was told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mounted = folder / "lus tre"
        self.root = self.mounted / "runs"
        self.root.mkdir(parents=True)
        self._log, self._tools = folder / "told", folder / "tools"
        self._table = folder / "mounts"
        self._tools.mkdir()
        self.mount((self.mounted, "lustre"))
        monkeypatch.setattr(lustre, "MOUNTS", str(self._table))
        monkeypatch.setattr(lustre, "_said", False)
        monkeypatch.setenv("PATH", str(self._tools))

    def mount(self, *mounts: tuple[Path, str]) -> None:
        lines = ["/dev/vda / ext4 rw 0 0", "proc /proc proc rw 0 0"]
        for path, kind in mounts:
            escaped = str(path).replace(" ", r"\040")
            lines.append(f"10.0.0.1@o2ib:/scratch {escaped} {kind} rw,flock 0 0")
        self._table.write_text("\n".join(lines) + "\n")

    def lfs(self, then: str = "exit 0") -> None:
        tool = self._tools / "lfs"
        tool.write_text(f'#!/bin/sh\necho "$*" >> "{self._log}"\n{then}\n')
        tool.chmod(0o755)

    def told(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path, monkeypatch)
    site.lfs()
    return site


def store_at(root: Path, **options: object) -> Store:
    return open_store(root, options)


def test_files_get_more_stripes_as_they_grow_where_nothing_is_asked_for(site: Site) -> None:
    store = store_at(site.root)
    store.make_folder("")
    assert site.told() == [], "the root holds what is not ours"
    store.make_folder("step-0000000001")
    assert site.told() == [f"setstripe {GROWING} {site.root}/step-0000000001"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stripe_count": 6}, "-c 6 -S 16777216"),
        ({"stripe_count": -1, "stripe_size": 1 << 20}, "-c -1 -S 1048576"),
        ({"stripe_size": 4 << 20}, "-S 4194304"),
    ],
)
def test_count_and_size_are_what_was_asked_for(
    site: Site, options: dict[str, int], words: str
) -> None:
    store_at(site.root, **options).make_folder("step-0000000001")
    assert site.told() == [f"setstripe {words} {site.root}/step-0000000001"]


def test_every_rank_says_it_once_for_each_generation(site: Site) -> None:
    ranks = [store_at(site.root) for _ in range(2)]
    for folder in ("step-0000000001", "step-0000000001", "step-0000000002"):
        for store in ranks:
            store.make_folder(folder)
    assert len(site.told()) == 4


def test_elsewhere_nothing_is_called(site: Site, tmp_path: Path) -> None:
    elsewhere = [tmp_path / "home", tmp_path / "lus tre2"]
    for root in elsewhere:
        store_at(root, stripe_count=4).make_folder("step-0000000001")
    site.mount((site.mounted, "lustre"), (site.root, "tmpfs"))
    store_at(site.root).make_folder("step-0000000001")
    site.mount((site.mounted, "lustre"), (site.mounted, "nfs4"))
    store_at(site.root).make_folder("step-0000000002")
    assert site.told() == []


def test_a_link_into_lustre_is_on_lustre(site: Site, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(site.root)
    store_at(tmp_path / "link").make_folder("step-0000000001")
    assert len(site.told()) == 1


def test_without_a_table_nothing_is_called(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lustre, "MOUNTS", str(site.root / "missing"))
    store_at(site.root).make_folder("step-0000000001")
    assert site.told() == []


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("echo 'setstripe: operation not permitted' >&2; exit 1", "operation not permitted"),
        ("exit 22", "exit code 22"),
        (None, "there is no `lfs` on the path"),
    ],
)
def test_an_lfs_that_fails_costs_one_warning(
    site: Site, caplog: pytest.LogCaptureFixture, then: str | None, reason: str
) -> None:
    if then is None:
        (site.root.parents[1] / "tools" / "lfs").unlink()
    else:
        site.lfs(then)
    with caplog.at_level(logging.WARNING):
        for root in (site.root, site.root / "other"):
            store = store_at(root)
            for folder in ("step-0000000001", "step-0000000002"):
                store.make_folder(folder)
                store.put(f"{folder}/manifest.json", b"{}")
    (line,) = caplog.messages
    assert "keeps the default striping" in line
    assert reason in line


def test_an_lfs_that_hangs_is_ended(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lustre, "_LFS_S", 0.2)
    site.lfs("while :; do :; done")
    store_at(site.root).make_folder("step-0000000001")
    assert "timed out" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stripe_count": 0}, "stripe_count must be 1 or more, or -1 for all"),
        ({"stripe_count": "4"}, "stripe_count must be"),
        ({"stripe_size": 100_000}, "stripe_size must be a multiple of 65536"),
        ({"stripe_size": True}, "stripe_size must be"),
        ({"stripe_count": 4, "key": "x"}, "a local path, which takes no storage_options; drop key"),
    ],
)
def test_what_lustre_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Checkpointer(tmp_path / "root", storage_options=options)


def test_a_run_with_striping_saves_and_resumes_on_any_file_system(tmp_path: Path) -> None:
    options = {"stripe_count": 4, "stripe_size": 16 << 20}
    state = {"w": torch.arange(1000.0)}
    with Checkpointer(tmp_path / "root", storage_options=options) as checkpointer:
        checkpointer.save(state, 1, block="committed")
    again = {"w": torch.zeros(1000)}
    with Checkpointer(tmp_path / "root", storage_options=options) as checkpointer:
        assert checkpointer.resume(again) is not None
    assert torch.equal(again["w"], state["w"])


def test_nothing_relies_on_flock_or_syncs_every_disk_of_the_machine() -> None:
    """Locks of files hold on one node only, or not at all; `sync` waits for what others write."""
    root = Path(__file__).resolve().parents[3]
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    assert len(files) > 50
    found = [
        f"{path}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.ImportFrom) and _is_banned(node)
    ]
    assert found == []


def _is_banned(node: ast.Attribute | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return node.module == "fcntl" or (node.module == "os" and "sync" in names)
    if node.attr == "sync":
        return isinstance(node.value, ast.Name) and node.value.id == "os"
    return node.attr in {"flock", "lockf", "F_SETLK", "F_SETLKW", "F_OFD_SETLK"}


PLAIN = """/scratch/step/rank-00000.0123abcd.safetensors
lmm_stripe_count:  2
lmm_stripe_offset: 3
\tobdidx\t\t objid\t\t objid\t\t group
\t     3\t      1093\t        0x445\t 0x240000400
\t    17\t      1094\t        0x446\t 0x280000400
"""
GROWN = """  lcm_layout_gen:    3
    lcme_id:             1
      lmm_stripe_count:  1
      lmm_objects:
      - 0: { l_ost_idx: 12, l_fid: [0x100000000:0x2:0x0] }
"""


def test_the_targets_of_a_save_that_is_stuck_are_named(site: Site) -> None:
    site.lfs(f"/bin/cat <<'END'\n{PLAIN}{GROWN}END")
    folder = site.root / "step-0000000001"
    folder.mkdir()
    assert lustre.targets_under(str(folder)) == [3, 12, 17]
    assert site.told() == [f"getstripe {folder}"]


@pytest.mark.parametrize("then", ["exit 1", "echo nonsense"])
def test_no_target_is_named_that_lfs_does_not_tell(site: Site, then: str) -> None:
    site.lfs(then)
    assert lustre.targets_under(str(site.root)) == []


def test_elsewhere_nobody_is_asked_for_targets(site: Site, tmp_path: Path) -> None:
    assert lustre.targets_under(str(tmp_path)) == []
    assert site.told() == []
