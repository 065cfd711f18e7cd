"""What S3 itself offers and neither fsspec nor obstore passes on.

Knows the requests, through the `call_s3` of s3fs. Knows nothing of stores or of what keys mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from torch_ckpt.storage.retry_after import pause_asked_by

_MAX_DELETED = 1_000
"""The server's limit for one request."""


class Bucket:
    """A bucket, by requests that s3fs signs and retries; raises what s3fs raises."""

    def __init__(self, fs: Any, name: str) -> None:
        self._fs, self._name = fs, name

    def abort_uploads(self, prefix: str, older_than_s: float, of: str) -> int:
        """Abort multipart uploads of keys that begin with `prefix` and have `of` in their rest."""
        latest = datetime.now(timezone.utc) - timedelta(seconds=older_than_s)
        found = [
            upload
            for upload in self._uploads(prefix)
            if of in upload["Key"][len(prefix) :]
            and (older_than_s <= 0 or upload["Initiated"] < latest)
        ]
        for upload in found:
            try:
                self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
            except FileNotFoundError:  # finished or aborted by somebody else since then
                continue
        return len(found)

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        markers: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=prefix, **markers)
            # Checked again: some servers ignore the prefix, and the others' are not ours to end.
            yield from (u for u in page.get("Uploads", ()) if u["Key"].startswith(prefix))
            if not page.get("IsTruncated"):
                return
            markers = {"KeyMarker": page["NextKeyMarker"]}
            if page.get("NextUploadIdMarker"):
                markers["UploadIdMarker"] = page["NextUploadIdMarker"]

    def delete(self, keys: list[str]) -> None:
        """Remove keys, many in a request.

        Raises:
            OSError: the server kept some of them; the answer as a whole counts as success then.
        """
        for start in range(0, len(keys), _MAX_DELETED):
            some = [{"Key": key} for key in keys[start : start + _MAX_DELETED]]
            answer = self._call("delete_objects", Delete={"Objects": some, "Quiet": True})
            if kept := [e for e in answer.get("Errors", ()) if e.get("Code") != "NoSuchKey"]:
                first = kept[0]
                raise OSError(
                    f"the server kept {len(kept)} objects, the first is {first.get('Key')}: "
                    f"{first.get('Code')} {first.get('Message', '')}".rstrip()
                )

    def delete_marker(self, folder_key: str) -> None:
        """Remove the empty object that some servers show in place of an empty folder."""
        self._call("delete_object", Key=f"{folder_key}/")

    def pause_asked(self, folder_key: str, *, writes: bool) -> float | None:
        """For how many seconds the server wants to be left alone, if it refuses a request now."""
        self._fs.retries = 1  # a request is sent once; the options have botocore do so, too
        try:
            if writes:
                # There is no such upload: a server that is well says so, and nothing is stored.
                target = {"Key": f"{folder_key}/asking", "UploadId": "0", "PartNumber": 1}
                self._call("upload_part", **target, Body=b"")
            else:
                self._call("list_objects_v2", Prefix=f"{folder_key}/", MaxKeys=1)
        except Exception as error:  # as above: whatever comes out of s3fs
            return pause_asked_by(error)
        return None

    def _call(self, request: str, **arguments: Any) -> dict[str, Any]:
        return self._fs.call_s3(request, Bucket=self._name, **arguments)
