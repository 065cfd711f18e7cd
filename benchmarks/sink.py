"""An S3 server that costs as little as Python can: it drops what is uploaded.

It listens on the loopback address and checks nothing. Small objects are kept. Of large ones only
the size is: what is read of them comes from the file that has their name without its first folder,
in the page cache, so whoever reads back what it sent finds it. Knows HTTP and the few requests that
clients of object stores make. Knows nothing of checkpoints.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEPT_BYTES = 2 << 20
"""Objects up to this size are kept: the documents of a checkpoint."""

RECEIVE_BYTES = 4 << 20
_ETAG = '"0123456789abcdef0123456789abcdef"'
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_NOWHERE = memoryview(mmap.mmap(-1, RECEIVE_BYTES))
"""Where dropped bytes would go; the kernel writes none of them, so it never takes memory."""


@dataclass(slots=True)
class Stored:
    size: int
    data: bytes | None = None


@dataclass(slots=True)
class Bucket:
    """All that the server remembers."""

    files: Path
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, dict[int, Stored]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def file_of(self, key: str) -> Path:
        return self.files / key.partition("/")[2]

    def finish(self, key: str, upload: str) -> None:
        with self.lock:
            parts = self.uploads.pop(upload, {})
            self.objects[key] = Stored(sum(part.size for part in parts.values()))

    def listed(self, prefix: str, delimiter: str) -> tuple[list[tuple[str, int]], list[str]]:
        with self.lock:
            sizes = {key: one.size for key, one in self.objects.items() if key.startswith(prefix)}
        folders: set[str] = set()
        for key in list(sizes):
            inside, found, _ = key[len(prefix) :].partition(delimiter or "\0")
            if found:
                folders.add(prefix + inside + delimiter)
                del sizes[key]
        return sorted(sizes.items()), sorted(folders)


class Connection:
    """One client's connection, in a thread of its own."""

    def __init__(self, end: socket.socket, bucket: Bucket) -> None:
        self._end, self._bucket = end, bucket
        self._ahead = b""

    def run(self) -> None:
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._end, suppress(OSError):
            while self._request():
                pass

    def _request(self) -> bool:
        while b"\r\n\r\n" not in self._ahead:
            if not (more := self._end.recv(65536)):
                return False
            self._ahead += more
        head, _, self._ahead = self._ahead.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in map(_halves, lines)}
        url = urlsplit(target)
        key = unquote(url.path).lstrip("/").partition("/")[2]
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        if headers.get("expect", "").lower() == "100-continue":
            self._end.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body(headers)
        getattr(self, f"_{method.lower()}", self._refuse)(key, query, headers, body)
        return headers.get("connection", "").lower() != "close"

    def _body(self, headers: dict[str, str]) -> Stored:
        """The body of a request, dropped if it is large."""
        length = int(headers.get("content-length", "0"))
        chunked = "aws-chunked" in headers.get("content-encoding", "")
        size = int(headers.get("x-amz-decoded-content-length", length))
        ahead, self._ahead = self._ahead[:length], self._ahead[length:]
        if length <= KEPT_BYTES:
            data = bytearray(ahead)
            while len(data) < length:
                data += self._received(length - len(data))
            return Stored(size, _unchunked(bytes(data)) if chunked else bytes(data))
        left = length - len(ahead)
        while left:
            # Linux: MSG_TRUNC takes bytes off a TCP stream without copying them anywhere.
            flags = socket.MSG_TRUNC | socket.MSG_WAITALL
            count = self._end.recv_into(_NOWHERE, min(left, RECEIVE_BYTES), flags)
            if not count:
                raise ConnectionError
            left -= count
        return Stored(size)

    def _received(self, limit: int) -> bytes:
        if not (data := self._end.recv(min(limit, 1 << 20))):
            raise ConnectionError
        return data

    def _put(self, key: str, query: dict[str, str], headers: dict[str, str], body: Stored) -> None:
        bucket = self._bucket
        if "uploadId" in query:
            with bucket.lock:
                bucket.uploads.setdefault(query["uploadId"], {})[int(query["partNumber"])] = body
        elif source := headers.get("x-amz-copy-source"):
            with bucket.lock:
                found = bucket.objects.get(unquote(source).lstrip("/").partition("/")[2])
                if found is not None:
                    bucket.objects[key] = found
            return self._xml("CopyObjectResult", f"<ETag>{escape(_ETAG)}</ETag>")
        elif key:
            with bucket.lock:
                if headers.get("if-none-match") == "*" and key in bucket.objects:
                    return self._answer(412)
                bucket.objects[key] = body
        return self._answer(200, extra=f"ETag: {_ETAG}\r\n")

    def _post(self, key: str, query: dict[str, str], headers: dict[str, str], body: Stored) -> None:
        name = f"<Bucket>ckpt</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in query:
            upload = os.urandom(8).hex()
            name += f"<UploadId>{upload}</UploadId>"
            return self._xml("InitiateMultipartUploadResult", name)
        if "uploadId" in query:
            self._bucket.finish(key, query["uploadId"])
            tag = f"<ETag>{escape(_ETAG)}</ETag>"
            return self._xml("CompleteMultipartUploadResult", name + tag)
        for gone in re.findall("<Key>(.*?)</Key>", (body.data or b"").decode()):
            self._bucket.objects.pop(gone, None)
        return self._xml("DeleteResult", "")

    def _delete(
        self, key: str, query: dict[str, str], headers: dict[str, str], body: Stored
    ) -> None:
        if "uploadId" in query:
            self._bucket.uploads.pop(query["uploadId"], None)
        else:
            self._bucket.objects.pop(key, None)
        self._answer(204)

    def _head(self, key: str, query: dict[str, str], headers: dict[str, str], body: Stored) -> None:
        found = self._bucket.objects.get(key)
        if key and found is None:
            return self._answer(404)
        extra = f"ETag: {_ETAG}\r\nLast-Modified: {_DATE}\r\nAccept-Ranges: bytes\r\n"
        return self._answer(200, length=found.size if found else 0, extra=extra)

    def _get(self, key: str, query: dict[str, str], headers: dict[str, str], body: Stored) -> None:
        if not key:
            return self._list(query)
        found = self._bucket.objects.get(key)
        if found is None:
            return self._xml("Error", f"<Code>NoSuchKey</Code><Key>{escape(key)}</Key>", 404)
        start, end = 0, found.size
        extra = f"ETag: {_ETAG}\r\nLast-Modified: {_DATE}\r\nAccept-Ranges: bytes\r\n"
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", "")):
            first, last = wanted.groups()
            start = int(first) if first else max(0, end - int(last))
            end = min(end, int(last) + 1) if first and last else end
            if start >= end:
                return self._xml("Error", "<Code>InvalidRange</Code>", 416)
            status = 206
            extra += f"Content-Range: bytes {start}-{end - 1}/{found.size}\r\n"
        self._answer(status, length=end - start, extra=extra)
        if found.data is not None:
            return self._end.sendall(found.data[start:end])
        with self._bucket.file_of(key).open("rb") as file:
            self._end.sendfile(file, start, end - start)
        return None

    def _list(self, query: dict[str, str]) -> None:
        if "uploads" in query:
            return self._xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
        prefix = query.get("prefix", "")
        keys, folders = self._bucket.listed(prefix, query.get("delimiter", ""))
        text = f"<Name>ckpt</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        text += f"<KeyCount>{len(keys) + len(folders)}</KeyCount><MaxKeys>100000</MaxKeys>"
        text += "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{escape(_ETAG)}</ETag><Size>{size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key, size in keys
        )
        for folder in folders:
            text += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        return self._xml("ListBucketResult", text)

    def _refuse(self, key: str, *_: object) -> None:
        self._answer(405)

    def _xml(self, kind: str, text: str, status: int = 200) -> None:
        xmlns = "" if kind == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{kind}{xmlns}>{text}</{kind}>'.encode()
        self._answer(status, length=len(body), extra="Content-Type: application/xml\r\n", body=body)

    def _answer(self, status: int, *, length: int = 0, extra: str = "", body: bytes = b"") -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{extra}\r\n"
        self._end.sendall(head.encode("latin-1") + body)


def _halves(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _unchunked(data: bytes) -> bytes:
    """The content of a body in `aws-chunked` encoding."""
    content = b""
    while data:
        head, _, data = data.partition(b"\r\n")
        length = int(head.partition(b";")[0], 16)
        if not length:
            break
        content, data = content + data[:length], data[length + 2 :]
    return content


def main() -> int:
    """Serve until standard input ends; the first line on standard output is the port."""
    parser = argparse.ArgumentParser(description="An S3 server that drops what it is sent.")
    parser.add_argument("files", type=Path, help="where the contents of large objects are read")
    bucket = Bucket(parser.parse_args().files)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)

    def serve() -> None:
        while True:
            end, _ = listener.accept()
            threading.Thread(target=Connection(end, bucket).run, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
