"""The obstore client for an fsspec URL and its storage options, where there is one.

Knows the option names of s3fs, gcsfs and adlfs and those of obstore. Knows nothing of what is
stored. Credentials come from the options or from where each cloud's own tools look, and go
nowhere but into a client.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch_ckpt.errors import ConfigError

SCHEMES = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "az"),
}
_HINTS = {"use_listings_cache", "skip_instance_cache", "listings_expiry_time", "max_paths"} | {
    "default_block_size",
    "default_fill_cache",
    "default_cache_type",
    "max_concurrency",
    "project",  # where gcsfs would make a bucket
}
"""Options that change how an fsspec file system works, not what it does."""
_CREDENTIALS_LAST = timedelta(minutes=5)
"""How long credentials are kept before their provider is asked again, which renews them early."""


FIRST_PAUSE_S = 0.1


class Untranslatable(Exception):
    """These options mean something that obstore has no word for."""


@dataclass(kw_only=True)
class Clients:
    """Makes clients of one bucket that differ in how long a request may take."""

    kind: str
    bucket: str
    config: dict[str, Any] = field(repr=False)
    client_options: dict[str, Any] = field(default_factory=dict, repr=False)
    credential_provider: Callable[[], Any] | None = field(default=None, repr=False)
    deadline_s: float = 30.0
    max_retries: int = 40
    retries_last_s: float = 180.0
    """Less than five minutes: a request is signed once for all its retries."""

    def single(
        self,
        patience: float = 1.0,
        *,
        retries: int | None = None,
        pause_s: float = FIRST_PAUSE_S,
    ) -> Any:
        """A client that deletes by one request a name, which not every server has the other for."""
        if self.kind != "s3":
            return self.client(patience, retries=retries, pause_s=pause_s)
        from obstore.exceptions import UnknownConfigurationKeyError

        alone = replace(self, config={**self.config, "disable_bulk_delete": True})
        try:
            return alone.client(patience, retries=retries, pause_s=pause_s)
        except UnknownConfigurationKeyError:  # an older obstore
            return self.client(patience, retries=retries, pause_s=pause_s)

    def client(
        self,
        patience: float = 1.0,
        *,
        retries: int | None = None,
        pause_s: float = FIRST_PAUSE_S,
    ) -> Any:
        """A client whose every request ends within its deadline, times `patience`.

        It repeats one at most `retries` times, first after `pause_s`.
        """
        from obstore import store

        make: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[self.kind]
        retry = {
            "max_retries": self.max_retries if retries is None else min(retries, self.max_retries),
            "retry_timeout": timedelta(seconds=self.retries_last_s),
            "backoff": {
                "init_backoff": timedelta(seconds=pause_s),
                "max_backoff": timedelta(seconds=max(15.0, pause_s)),
                "base": 2,
            },
        }
        options = {
            **self.client_options,
            "timeout": timedelta(seconds=self.deadline_s * patience),
        }
        provider = {"credential_provider": self.credential_provider}
        return make(
            self.bucket,
            config=self.config,
            client_options=options,
            retry_config=retry,
            **{key: value for key, value in provider.items() if value is not None},
        )


def translate(url: str, storage_options: dict[str, Any]) -> tuple[Clients, str]:
    """Clients for the bucket of an fsspec URL, and the prefix in it.

    Raises:
        Untranslatable: an option, or the URL itself, has no counterpart in obstore.
        ConfigError: there are no credentials.
    """
    parts = urlsplit(url)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if "#" in url or "?" in url:  # urlsplit cuts them off, but they are part of a key
        _, _, path = url.partition("://")
        bucket, _, prefix = path.partition("/")
        prefix = prefix.strip("/")
    kind = SCHEMES[parts.scheme.lower()]
    options = {key: value for key, value in storage_options.items() if key not in _HINTS}
    if kind == "az" and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        options.setdefault("account_name", host.partition(".")[0])
    if not bucket or ":" in bucket or "@" in bucket:
        raise Untranslatable(f"the bucket {bucket!r}")
    clients = {"s3": _s3, "gs": _gs, "az": _az}[kind](bucket, options)
    if options:
        raise Untranslatable(f"the option {', '.join(sorted(options))}")
    return clients, prefix


def _s3(bucket: str, options: dict[str, Any]) -> Clients:
    client_kwargs = dict(options.pop("client_kwargs", None) or {})
    named = {
        "key": client_kwargs.pop("aws_access_key_id", None),
        "secret": client_kwargs.pop("aws_secret_access_key", None),
        "token": client_kwargs.pop("aws_session_token", None),
        "endpoint_url": client_kwargs.pop("endpoint_url", None),
    }
    named = {name: options.pop(name, None) or value for name, value in named.items()}
    anonymous, profile = options.pop("anon", False), options.pop("profile", None)
    region = client_kwargs.pop("region_name", None)
    # SHA-256 of each part, which the signature needs anyway: the server checks what arrives.
    config: dict[str, Any] = {"checksum_algorithm": "sha256"}
    clients = Clients(kind="s3", bucket=bucket, config=config)
    _verification(clients, client_kwargs.pop("verify", True))
    _deadlines(clients, options)
    _checksums(clients, options)
    if options.pop("requester_pays", False):
        config["request_payer"] = True
    if client_kwargs:
        raise Untranslatable(f"the option client_kwargs[{', '.join(sorted(client_kwargs))}]")

    session = _session(profile)
    endpoint = named["endpoint_url"] or _endpoint(session)
    if endpoint:
        config["aws_endpoint_url_s3"] = endpoint.rstrip("/")
        clients.client_options["allow_http"] = endpoint.startswith("http://")
        if not _is_private(endpoint):
            # On an open line the signature is all that keeps others from changing body and
            # checksum together; botocore signs there too, whatever it is told.
            config.pop("unsigned_payload", None)
    if region or (region := _region(session)):
        config["region"] = region
    if anonymous:
        config["skip_signature"] = True
    elif named["key"] and named["secret"]:
        config["access_key_id"], config["secret_access_key"] = named["key"], named["secret"]
        if named["token"]:
            config["session_token"] = named["token"]
        else:
            # Unless told, the client would add the token that belongs to the keys in the
            # environment.
            clients.credential_provider = lambda: {
                "access_key_id": named["key"],
                "secret_access_key": named["secret"],
                "token": None,
                "expires_at": None,
            }
    elif session is not None:
        clients.credential_provider = _credentials(session, bucket)
    elif profile:
        raise Untranslatable("the option profile (without botocore)")
    return clients


def _session(profile: str | None) -> Any:
    """What botocore knows of this machine's AWS configuration; None without botocore."""
    try:
        from botocore.exceptions import ProfileNotFound
        from botocore.session import Session
    except ImportError:
        return None
    session = Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound as error:
        raise ConfigError(f"{error}; see ~/.aws/config, or AWS_PROFILE") from error
    return session


def _endpoint(session: Any) -> str | None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if found := os.environ.get(name):
            return found
    return session.get_scoped_config().get("endpoint_url") if session is not None else None


def _region(session: Any) -> str | None:
    found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return found or (session.get_config_variable("region") if session is not None else None)


def _credentials(session: Any, bucket: str) -> Callable[[], dict[str, Any]]:
    """A provider by botocore, which knows environment, profiles, roles and instance metadata."""
    credentials = session.get_credentials()
    if credentials is None:
        raise ConfigError(
            f"there are no AWS credentials for s3://{bucket}: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the instance a role; "
            "a public bucket needs storage_options={'anon': True}"
        )

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _CREDENTIALS_LAST,
        }

    return provide


def _verification(clients: Clients, verify: bool | str) -> None:
    if verify is False:
        clients.client_options["allow_invalid_certificates"] = True
    elif isinstance(verify, str | os.PathLike):
        clients.client_options["root_certificate"] = Path(verify).read_bytes()


def _deadlines(clients: Clients, options: dict[str, Any]) -> None:
    """botocore's time-outs and attempts; its read time-out is the deadline of a whole request."""
    if not (config := dict(options.pop("config_kwargs", None) or {})):
        return
    config.pop("max_pool_connections", None)
    if connect := config.pop("connect_timeout", None):
        clients.client_options["connect_timeout"] = timedelta(seconds=connect)
    clients.deadline_s = float(config.pop("read_timeout", None) or clients.deadline_s)
    retries = dict(config.pop("retries", None) or {})
    retries.pop("mode", None)
    if attempts := retries.pop("total_max_attempts", None):
        clients.max_retries = attempts - 1
    clients.max_retries = retries.pop("max_attempts", clients.max_retries)
    if config.pop("request_checksum_calculation", None) == "when_required":
        del clients.config["checksum_algorithm"]
    s3 = dict(config.pop("s3", None) or {})
    if s3.get("addressing_style") in ("path", "auto"):
        del s3["addressing_style"]
    if s3.pop("payload_signing_enabled", True) is False:
        clients.config["unsigned_payload"] = True
    if s3:
        config["s3"] = s3
    if left := {*config, *retries}:
        raise Untranslatable(f"the option config_kwargs[{', '.join(sorted(left))}]")


def _checksums(clients: Clients, options: dict[str, Any]) -> None:
    """The checksum that each part carries, named as boto's calls name it.

    obstore takes SHA-256 of a body by itself, once for signature and checksum together; it cannot
    be given one. So only another checksum, with the payload unsigned, spares that.
    """
    config, more = clients.config, dict(options.pop("s3_additional_kwargs", None) or {})
    wanted = more.pop("ChecksumAlgorithm", None)
    if more or wanted not in (None, "SHA256", "CRC64NVME"):
        named = sorted(more) or [f"ChecksumAlgorithm={wanted}"]
        raise Untranslatable(f"the option s3_additional_kwargs[{', '.join(named)}]")
    if wanted is not None:
        config["checksum_algorithm"] = wanted.lower()
    if config.get("unsigned_payload") and "checksum_algorithm" not in config:
        raise ConfigError(
            "payload_signing_enabled=False with request_checksum_calculation='when_required' "
            "leaves uploads unchecked; name a checksum: "
            "s3_additional_kwargs={'ChecksumAlgorithm': 'CRC64NVME'}"
        )


def _is_private(endpoint: str) -> bool:
    """Whether nobody between can change what is sent: TLS, or no network at all."""
    parts = urlsplit(endpoint)
    return parts.scheme == "https" or parts.hostname in ("127.0.0.1", "::1", "localhost")


def _gs(bucket: str, options: dict[str, Any]) -> Clients:
    token, endpoint = options.pop("token", None), options.pop("endpoint_url", None)
    clients = Clients(kind="gs", bucket=bucket, config={})
    if endpoint:
        clients.config["base_url"] = endpoint.rstrip("/")
        clients.client_options["allow_http"] = endpoint.startswith("http://")
    if token == "anon":
        clients.config["skip_signature"] = True
    elif isinstance(token, str) and token not in {"google_default", "cloud"}:
        if not os.path.isfile(token):
            raise Untranslatable("the option token, which is no file")
        clients.config["application_credentials"] = token
    elif token is not None and not isinstance(token, str):
        raise Untranslatable("the option token, which is no file")
    return clients


_AZURE_NAMES = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_key",
    "tenant_id": "tenant_id",
    "client_id": "client_id",
    "client_secret": "client_secret",
    "anon": "skip_signature",
}


def _az(bucket: str, options: dict[str, Any]) -> Clients:
    given = {ours: options.pop(theirs, None) for theirs, ours in _AZURE_NAMES.items()}
    config = {name: value for name, value in given.items() if value}
    if "account_name" not in config and "AZURE_STORAGE_ACCOUNT_NAME" not in os.environ:
        raise Untranslatable("a URL without account_name")
    return Clients(kind="az", bucket=bucket, config=config)
