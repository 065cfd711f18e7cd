"""Where the generations of a caller are: under the run's root, or in a folder named elsewhere.

Knows paths, URLs and stores. Knows nothing of saves or loads.
"""

from __future__ import annotations

import os

from torch_ckpt.config import Config
from torch_ckpt.errors import ConfigError
from torch_ckpt.generations.catalog import Catalog, Generation
from torch_ckpt.generations.tiers import Tier
from torch_ckpt.reach import Reach
from torch_ckpt.storage.spelling import local_path, same_place
from torch_ckpt.storage.store import Store, open_beside, open_store


class Places:
    """The store of a run's root, and those of other folders that a caller names."""

    def __init__(self, config: Config) -> None:
        self._options = config.storage_options
        self.store = open_store(config.root, config.storage_options)
        """The run's own."""
        tiers = [Tier(name="primary", store=self.store)]
        if config.cache is not None:
            tiers.insert(0, Tier(name="cache", store=open_store(config.cache)))
        if config.archive is not None:
            archive = open_store(config.archive, config.archive_options)
            tiers.append(Tier(name="archive", store=archive))
        self.reach = Reach(tiers)
        """The run's root and what else holds its generations."""

    def reach_at(self, root: str) -> Reach:
        """The tiers of a root; one that is not the run's has no others."""
        if root == self.store.url:
            return self.reach
        return Reach([Tier(name="primary", store=self.store_at(root))])

    def split(self, folder: str | os.PathLike[str]) -> tuple[str, str]:
        """The root and the name of a folder, which may be a path or URL elsewhere.

        Raises:
            ConfigError: it does not name a folder.
        """
        text = os.fspath(folder)
        text = text if (path := local_path(text)) is None else path
        if "://" in text:
            root, _, name = text.rstrip("/").rpartition("/")
        elif os.sep in text:
            root, name = os.path.split(os.path.abspath(os.path.expanduser(text)))
        else:
            root, name = self.store.url, text
        if name in ("", ".", ".."):
            raise ConfigError(f"folder must name a folder, got {folder!r}")
        # From here on the run's root is told from others by its text. Links are not looked at:
        # a file system that hangs must not hold up a save.
        if "://" in root and same_place(root, self.store.url):
            root = self.store.url
        return root, name

    def store_at(self, root: str) -> Store:
        """The store of a root."""
        if root == self.store.url:
            return self.store
        return open_beside(root, self.store.url, self._options)

    def generation(self, root: str, folder: str) -> Generation:
        """The generation in a folder.

        Raises:
            GenerationNotFound: there is none.
        """
        return Catalog(self.store_at(root)).find(folder=folder)
