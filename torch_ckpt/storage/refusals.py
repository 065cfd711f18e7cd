"""What an object store's refusal means, read from what obstore says of it.

Knows obstore's exceptions and the shape of their texts. Knows nothing of stores. The texts go on
without what they must not carry: a URL's query can be a signature.
"""

from __future__ import annotations

import re

from torch_ckpt.errors import StorageError

_XML = re.compile(r"<Code>(?P<code>[^<]*)</Code>(.*?<Message>(?P<message>[^<]*)</Message>)?", re.S)
_PUT_OFF = re.compile(r"status code: (429|503) ")
_FINAL = re.compile(r"status code: 4(?!08|29)\d\d ")
_LONGEST = 400
_NEXT_MOVES = {
    "PermissionDeniedError": "give these credentials the permission, or use others",
    "UnauthenticatedError": "the credentials are wrong or have expired",
    "LOCATION": "the bucket is in another region: say which by "
    "storage_options={'client_kwargs': {'region_name': ...}} or AWS_REGION",
    "NoSuchBucket": "make the bucket first, or check its name",
    "503 ": "the server is overloaded or down: what was asked can be tried again later",
    "429 ": "the server is overloaded: what was asked can be tried again later",
    "error sending request": "no answer came in time: is the server up, and the endpoint right?",
}


def refusal(action: str, where: str, error: Exception) -> StorageError:
    """The StorageError for a failed `action` (an infinitive) on `where`."""
    text = f"{type(error).__name__} {error}"
    next_move = next((move for sign, move in _NEXT_MOVES.items() if sign in text), None)
    return StorageError(
        f"cannot {action} {where}: {cause_of(error)}" + (f"; {next_move}" if next_move else "")
    )


def is_missing(error: Exception) -> bool:
    """Whether the name is not there; a bucket that is not there is another matter."""
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)


def is_behind_the_end(error: Exception) -> bool:
    """Whether a range was asked for that begins at or behind the end of an object."""
    return " 416 " in str(error)


def is_forgotten(error: Exception) -> bool:
    """Whether the server knows nothing of a multipart upload: it was finished, or aborted."""
    return "NoSuchUpload" in str(error)


def is_too_large(error: Exception) -> bool:
    """Whether an object is too large for the request."""
    return any(code in str(error) for code in ("EntityTooLarge", "InvalidRequest"))


def is_broken_off(error: Exception) -> bool:
    """Whether the connection ended or stalled in the middle of an answer.

    obstore asks again only where that is the content of an object.
    """
    return "response body error" in str(error)


def is_put_off(error: Exception) -> bool:
    """Whether the server wants to be asked later."""
    return _PUT_OFF.search(str(error)) is not None


def is_passing(error: Exception) -> bool:
    """Whether the same request may be answered in another way the next time."""
    # The classes of obstore that say more than this one are about the request, not its way.
    return type(error).__name__ == "GenericError" and _FINAL.search(str(error)) is None


def is_unanswered(error: Exception) -> bool:
    """Whether a request was sent and no answer came."""
    return "error sending request" in str(error)


def cause_of(error: Exception) -> str:
    """What obstore says of an error, in one line that may be shown."""
    text = str(error).partition("\n\nDebug source:")[0]
    if (found := _XML.search(text)) is not None:
        said = ": ".join(filter(None, (found["code"], found["message"])))
        text = f"{text[: text.index('<')].strip()} {said}"
    text = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)
    return " ".join(text.split())[:_LONGEST] or type(error).__name__
