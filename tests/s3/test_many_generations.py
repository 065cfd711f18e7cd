"""Ten thousand generations of eight ranks in one bucket: seconds, and not one request for each."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import samples
from tests.s3.proxy import Proxy
from tests.s3.servers import Server, options_for
from torch_ckpt.cli.main import run
from torch_ckpt.generations.catalog import Catalog
from torch_ckpt.generations.index import FRESH, write_index
from torch_ckpt.generations.prune import prune
from torch_ckpt.generations.retention import KeepEvery, KeepLast
from torch_ckpt.manifest.commit import update_tags
from torch_ckpt.manifest.layout import INDEX, folder_name, part_name
from torch_ckpt.manifest.schema import StoredFile, Summary, dump_index
from torch_ckpt.storage.store import Store, open_store

MANY, RANKS, PAGE = 10_000, 8, 1000


@pytest.fixture
def proxy(moto_server: Server) -> Iterator[Proxy]:
    """In front of the server: it counts requests as the server meets them."""
    with Proxy(moto_server.endpoint_url) as proxy:
        yield proxy


def fill(server: Server, prefix: str) -> None:
    """The manifests, and the index that a run would have written step by step."""
    parts = [
        StoredFile(name=part_name(rank, "0123abcd"), bytes=10_000, sha256="a" * 64)
        for rank in range(RANKS)
    ]
    client = server.client()

    def put(step: int) -> Summary:
        manifest = samples.manifest(
            parts, step=step, attempt=f"{step:08x}", bytes=1 << 40, metrics={"loss": 1 / step}
        )
        folder = folder_name(step)
        key = f"{prefix}/{folder}/manifest.json"
        client.put_object(Bucket=server.bucket, Key=key, Body=manifest.dump())
        return Summary(
            folder=folder,
            manifest=manifest.without_parts(),
            parts_bytes=RANKS * 10_000,
            sha256=manifest.sha256,
        )

    with ThreadPoolExecutor(4) as pool:
        summaries = list(pool.map(put, range(1, MANY + 1)))
    client.put_object(Bucket=server.bucket, Key=f"{prefix}/{INDEX}", Body=dump_index(summaries))


def requests(proxy: Proxy) -> Counter[str]:
    found = Counter(request.method for request in proxy.log())
    proxy.clear()
    return found


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_ten_thousand_generations_are_listed_in_seconds(
    moto_server: Server,
    proxy: Proxy,
    prefix: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(moto_server, prefix)
    url, options = f"s3://{moto_server.bucket}/{prefix}", options_for(proxy.url)
    store: Store = open_store(url, options)
    catalog = Catalog(store)

    started = time.monotonic()
    committed = catalog.committed()
    taken = time.monotonic() - started

    found = requests(proxy)
    few = MANY // PAGE + 1 + FRESH + 4  # pages of the listing, the index, the newest
    assert [one.step for one in committed] == list(range(MANY, 0, -1))
    assert committed[-1].stored_bytes == (1 << 40) + RANKS * 10_000
    assert found.total() <= few, found
    assert taken < 20
    assert catalog.find(step=17).manifest.parts[7].bytes == 10_000
    requests(proxy)

    # A tag that the index has not heard of, an index that was rewritten, a folder that has gone.
    update_tags(store, folder_name(17), add={"permanent": ""})
    update_tags(store, folder_name(18), add={"permanent": ""})
    write_index(catalog, changed=[folder_name(18)])
    store.delete(f"{folder_name(19)}/manifest.json")
    tagged = {one.step: one for one in catalog.committed()}
    assert (tagged[18].tags, 19 in tagged) == ({"permanent": ""}, False)
    requests(proxy)
    verdicts = prune(catalog, KeepLast(MANY - 30) | KeepEvery(5), run=None)
    gone = [verdict.generation.step for verdict in verdicts if not verdict.kept]
    assert sorted(gone) == [n for n in range(1, 31) if n % 5 and n not in (17, 18, 19)]
    # For a deletion: its parts (which are not there), and a few more.
    assert requests(proxy).total() <= 2 * few + len(gone) * (RANKS + 12)

    words = [f"--storage-option={key}={json.dumps(value)}" for key, value in options.items()]
    started = time.monotonic()
    assert run(["ls", url, *words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["generations"]) == MANY - 1 - len(gone)
    assert time.monotonic() - started < 40
    # Its second listing finds what saves have begun.
    assert requests(proxy).total() <= few + MANY // PAGE + 8
