"""Requests to one bucket: through which client, how often, and not before the server wants them.

Knows obstore's clients and what their errors mean. Knows nothing of names or of what is asked.

obstore repeats what failed after pauses of its own, whatever a `Retry-After` says, and does not
show it. So for a caller who has time it repeats nothing at first, and a server that puts a request
off is asked for how long, by another client. That would end an upload for one of its parts; so
only the first upload ends early, which finds out whether the server says how long, and in later
ones obstore repeats parts as often as ever, after such pauses as the server asked for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from torch_ckpt.errors import ServerBusy
from torch_ckpt.storage.clients import FIRST_PAUSE_S, Clients
from torch_ckpt.storage.refusals import cause_of, is_passing, is_put_off

TRIES = 4
"""Of what obstore sends once: a conditional write, a deletion, an answer that broke off."""
_FEW = 2
_LONGEST_PAUSE_S = 150.0
"""Between two tries of a part; obstore must have time for a second one."""


def pause_before(attempt: int) -> None:
    """Wait before something is tried again, after so many attempts."""
    time.sleep(random.uniform(0.0, 0.2 * 2**attempt))


def _never(error: Exception) -> bool:
    return False


class Requests:
    """What is sent to a bucket by any thread of this process through one store."""

    def __init__(
        self, url: str, clients: Clients, pause_asked: Callable[[bool], float | None] | None
    ) -> None:
        """`pause_asked` sends a request, which writes or does not, to hear how long a server that
        refuses it wants to be left alone. Without it obstore repeats everything at once.
        """
        self._url, self._clients, self._pause_asked = url, clients, pause_asked
        self._made: dict[tuple[float, bool, int | None], Any] = {}
        self._pause_s, self._until = FIRST_PAUSE_S, float("-inf")
        self._unheard = pause_asked is not None
        self._lock, self._asking = threading.Lock(), threading.Lock()

    def ask(
        self,
        request: Callable[..., Any],
        *args: Any,
        patience: float = 1.0,
        alone: bool = False,
        writes: bool = False,
        again_if: Callable[[Exception], bool] = _never,
        **options: Any,
    ) -> Any:
        """The answer to `request(client, ...)`, repeated where obstore does so, and by `again_if`.

        Raises:
            ServerBusy: the server asks to be left alone, now or since an earlier request.
        """
        self.insist()
        if self._pause_asked is not None:
            try:
                return request(self.client(patience, alone=alone, retries=0), *args, **options)
            except Exception as error:
                self.heed(error, writes=writes)
                if not is_passing(error):
                    raise
        client, attempt = self.client(patience, alone=alone), 1
        while True:
            try:
                return request(client, *args, **options)
            except Exception as error:
                if attempt == TRIES or not again_if(error):
                    self.heed(error, writes=writes)
                    raise
            pause_before(attempt)
            attempt += 1

    def client(
        self, patience: float = 1.0, *, alone: bool = False, retries: int | None = None
    ) -> Any:
        """A client whose deadline is `patience` times the ordinary one; `alone`: for deletions."""
        with self._lock:
            key = patience, alone, retries
            if (client := self._made.get(key)) is None:
                clients = self._clients
                make = clients.single if alone else clients.client
                client = make(patience, retries=retries, pause_s=self._pause_s)
                self._made[key] = client
            return client

    def _be_slow(self, pause_s: float) -> None:
        """Let obstore repeat what failed after such pauses from now on."""
        with self._lock:
            if pause_s != self._pause_s:
                self._made.clear()  # a server may ask for another pause each time, for hours
            self._pause_s = pause_s

    def upload_tries(self) -> tuple[int | None, ...]:
        """How often obstore repeats a part, in each of the tries of a whole upload."""
        return (_FEW, None) if self._unheard else (None,)

    def be_patient(self) -> None:
        """An upload failed: from now on obstore repeats parts as often as it may."""
        self._unheard = False

    def insist(self) -> None:
        """Raise ServerBusy while the server wants to be left alone."""
        if (left_s := self._until - time.monotonic()) > 0.0:
            raise ServerBusy(f"{self._url} is not asked now", retry_after_s=left_s)

    def heed(self, error: Exception, *, writes: bool) -> None:
        """Raise ServerBusy if the server put a request off, and says for how long."""
        if self._pause_asked is None or not is_put_off(error):
            return
        with self._asking:
            self.insist()  # another thread may have been told meanwhile
            pause_s = self._pause_asked(writes)
            self._unheard = False
            if pause_s is None:
                return
            self._be_slow(min(pause_s, _LONGEST_PAUSE_S))
            self._until = time.monotonic() + pause_s
        refused = f"{self._url} puts requests off: {cause_of(error)}"
        raise ServerBusy(refused, retry_after_s=pause_s)
