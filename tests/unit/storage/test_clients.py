"""Storage options mean the same through obstore as through fsspec, or go to fsspec whole."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from torch_ckpt.errors import ConfigError
from torch_ckpt.storage.clients import Untranslatable, translate
from torch_ckpt.storage.objects import ObjectStore
from torch_ckpt.storage.remote import FsspecStore
from torch_ckpt.storage.store import open_store

KEYS = {"key": "AKIDEXAMPLE", "secret": "wJalrEXAMPLE"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of this machine, and no look-up of instance metadata."""
    import os

    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_keys_endpoint_and_region_are_taken_from_either_place() -> None:
    top, prefix = translate(
        "s3://bucket/a/b/",
        {**KEYS, "endpoint_url": "http://host:1/", "client_kwargs": {"region_name": "eu-west-1"}},
    )
    nested, _ = translate(
        "s3://bucket/a/b",
        {
            "client_kwargs": {
                "aws_access_key_id": KEYS["key"],
                "aws_secret_access_key": KEYS["secret"],
                "endpoint_url": "http://host:1",
                "region_name": "eu-west-1",
            }
        },
    )
    assert prefix == "a/b"
    assert top.config == nested.config
    assert top.config["access_key_id"] == KEYS["key"]
    assert top.config["aws_endpoint_url_s3"] == "http://host:1"
    assert top.client_options["allow_http"]


def test_a_token_in_the_environment_does_not_join_keys_of_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    clients, _ = translate("s3://bucket/run", KEYS)
    assert clients.credential_provider is not None
    assert clients.credential_provider()["token"] is None
    clients, _ = translate("s3://bucket/run", {**KEYS, "token": "mine"})
    assert clients.config["session_token"] == "mine"


def test_a_profile_gives_keys_region_and_endpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-north-1\nendpoint_url = https://s3.lab\n"
    )
    (tmp_path / "credentials").write_text(
        "[lab]\naws_access_key_id = AKIDLAB\naws_secret_access_key = labsecret\n"
    )
    for options in ({"profile": "lab"}, {}):
        if not options:
            monkeypatch.setenv("AWS_PROFILE", "lab")
        clients, _ = translate("s3://bucket/run", options)
        assert clients.config["region"] == "eu-north-1"
        assert clients.config["aws_endpoint_url_s3"] == "https://s3.lab"
        assert clients.credential_provider is not None
        given = clients.credential_provider()
        assert (given["access_key_id"], given["secret_access_key"]) == ("AKIDLAB", "labsecret")
        # Asked for again before long: a role's credentials change.
        assert given["expires_at"] < datetime.now(timezone.utc) + timedelta(hours=1)


def test_without_credentials_the_error_says_how_to_give_them() -> None:
    with pytest.raises(ConfigError, match=r"AWS_PROFILE.*anon"):
        open_store("s3://bucket/run")
    with pytest.raises(ConfigError, match="nosuchprofile"):
        open_store("s3://bucket/run", {"profile": "nosuchprofile"})
    assert isinstance(open_store("s3://bucket/run", {"anon": True}), ObjectStore)


def test_time_outs_and_attempts_of_botocore_hold() -> None:
    config = {"connect_timeout": 2, "read_timeout": 7, "retries": {"max_attempts": 3}}
    clients, _ = translate("s3://bucket/run", {**KEYS, "config_kwargs": config})
    assert clients.deadline_s == 7.0
    assert clients.max_retries == 3
    assert clients.client_options["connect_timeout"] == timedelta(seconds=2)


UNSIGNED = {"config_kwargs": {"s3": {"payload_signing_enabled": False}}}
CRC = {"s3_additional_kwargs": {"ChecksumAlgorithm": "CRC64NVME"}}


@pytest.mark.parametrize(
    ("endpoint", "unsigned"),
    [
        (None, True),
        ("https://objects.lab", True),
        ("http://127.0.0.1:8333", True),
        ("http://objects.lab", False),
        ("http://127.0.0.1.objects.lab", False),
    ],
)
def test_a_payload_goes_unsigned_only_where_nobody_between_could_change_it(
    endpoint: str | None, unsigned: bool
) -> None:
    options = {**KEYS, **UNSIGNED, **CRC, "endpoint_url": endpoint}
    clients, _ = translate("s3://bucket/run", options)
    assert clients.config.get("unsigned_payload", False) is unsigned
    assert clients.config["checksum_algorithm"] == "crc64nvme"
    clients.client()


def test_a_payload_is_signed_and_carries_its_sha256_unless_told_otherwise() -> None:
    clients, _ = translate("s3://bucket/run", {**KEYS, "endpoint_url": "https://objects.lab"})
    assert clients.config["checksum_algorithm"] == "sha256"
    assert "unsigned_payload" not in clients.config


def test_a_payload_with_neither_signature_nor_checksum_is_refused() -> None:
    config = {**UNSIGNED["config_kwargs"], "request_checksum_calculation": "when_required"}
    with pytest.raises(ConfigError, match="ChecksumAlgorithm"):
        open_store("s3://bucket/run", {**KEYS, "config_kwargs": config})
    named, _ = translate("s3://bucket/run", {**KEYS, **CRC, "config_kwargs": config})
    assert named.config["checksum_algorithm"] == "crc64nvme"


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://bucket/run", {**KEYS, "cache_regions": True}, "cache_regions"),
        ("s3://bucket/run", {**KEYS, "client_kwargs": {"api_version": "1"}}, "api_version"),
        ("s3://bucket/run", {**KEYS, "config_kwargs": {"proxies": {}}}, "proxies"),
        ("s3://bucket/run", {**KEYS, "config_kwargs": {"s3": {"use_arn_region": True}}}, "s3"),
        (
            "s3://bucket/run",
            {**KEYS, "s3_additional_kwargs": {"ChecksumAlgorithm": "SHA1"}},
            "ChecksumAlgorithm=SHA1",
        ),
        (
            "s3://bucket/run",
            {**KEYS, "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}},
            "ServerSideEncryption",
        ),
        ("s3://arn:aws:s3:eu:1:accesspoint/x/run", KEYS, "bucket"),
        ("gs://bucket/run", {"token": {"type": "authorized_user"}}, "token"),
        ("az://container/run", {"account_name": "a", "connection_string": "b"}, "connection"),
        ("az://container/run", {}, "account_name"),
    ],
)
def test_what_obstore_cannot_take_is_never_dropped(
    url: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(Untranslatable, match=named):
        translate(url, options)


def test_a_url_with_such_an_option_goes_through_fsspec_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "torch_ckpt")
    store = open_store("s3://bucket/run", {**KEYS, "cache_regions": True})
    assert isinstance(store, FsspecStore)
    assert "cache_regions" in caplog.text
    assert KEYS["secret"] not in caplog.text


def test_hints_for_fsspec_change_nothing() -> None:
    plain, _ = translate("s3://bucket/run", KEYS)
    hinted, _ = translate("s3://bucket/run", {**KEYS, "use_listings_cache": False})
    assert plain.config == hinted.config


def test_options_of_the_other_clouds(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.write_text("{}")
    google, prefix = translate("gs://bucket/run", {"token": str(key), "project": "p"})
    assert (google.kind, google.bucket, prefix) == ("gs", "bucket", "run")
    assert google.config == {"application_credentials": str(key)}
    azure, prefix = translate("az://box/run", {"account_name": "me", "account_key": "a2V5"})
    assert azure.config == {"account_name": "me", "account_key": "a2V5"}
    named, _ = translate("abfss://box@me.dfs.core.windows.net/run", {"sas_token": "sv=1&sig=x"})
    assert named.bucket == "box"
    assert named.config == {"account_name": "me", "sas_key": "sv=1&sig=x"}
    for clients in (azure, named):
        clients.client()
    translate("gs://bucket/run", {"token": "anon"})[0].client()


def test_secrets_are_not_in_what_is_shown_or_raised() -> None:
    clients, _ = translate("s3://bucket/run", KEYS)
    assert KEYS["secret"] not in repr(clients)
    assert KEYS["key"] not in repr(clients)
    store = open_store(
        "s3://bucket/run",
        {**KEYS, "endpoint_url": "http://127.0.0.1:9"}
        | {"config_kwargs": {"retries": {"max_attempts": 0}}},
    )
    with pytest.raises(Exception) as caught:
        store.put("x", b"1")
    shown = "".join(map(str, (caught.value, caught.value.__cause__)))
    assert KEYS["secret"] not in shown
    assert KEYS["key"] not in shown
    assert caught.value.__suppress_context__
