"""Places that are spelt in several ways: paths, links, and the schemes that clouds share.

Knows paths and URLs. Knows nothing of stores, options or servers: of two accounts or endpoints that
have a bucket of one name, only what the URL says is looked at.
"""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"(?P<name>[A-Za-z][\w+.-]*)(?P<chained>::.*)?://")
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "local": "file"}


def kind_of(url: str) -> str:
    """What kind of place a path or URL is: where the same options mean the same."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return "file"
    name = scheme["name"].lower()
    return _SAME.get(name, name) + (scheme["chained"] or "")


def local_path(url: str) -> str | None:
    """The path that a path or a `file` URL means; None for any other URL."""
    if kind_of(url) != "file":
        return None
    scheme = _SCHEME.match(url)
    return url if scheme is None else url[scheme.end() :]


def place_of(url: str) -> str:
    """A path or URL as every other spelling of the same place gives it; follows links."""
    if (path := local_path(url)) is not None:
        return os.path.realpath(os.path.expanduser(path))
    kind, rest = kind_of(url), url.partition("://")[2]
    if "::" in kind:
        return f"{kind}://{rest.rstrip('/')}"
    bucket, _, prefix = rest.strip("/").partition("/")
    if kind == "az" and "@" in bucket:  # `container@account.dfs.core.windows.net`
        container, _, host = bucket.partition("@")
        bucket = f"{container}@{host.partition('.')[0]}"
    prefix = prefix.strip("/")
    return f"{kind}://{bucket}/{prefix}" if prefix else f"{kind}://{bucket}"


def same_place(one: str, other: str) -> bool:
    """Whether two paths or URLs are spellings of one place; asks no file system about a URL."""
    return one == other or (kind_of(one) == kind_of(other) and place_of(one) == place_of(other))
