"""The form of a remote cache's URL, checked where settings are read.

    s3://BUCKET/PREFIX?endpoint=URL&region=NAME     buckets
    file:///DIR                                     a shared folder

This module asks nobody, and imports nothing of the tiers.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

URL_SETTINGS = ("endpoint", "region")
BUCKETS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
SERVERS = ("http", "https")
LOCAL = ("file", "memory")
EXAMPLES = "s3://BUCKET/PREFIX?endpoint=URL or file:///DIR"


def check_url(url: str) -> None:
    """Raise ValueError, saying what is wrong, for a remote cache's URL that cannot be one."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}; it must be like {EXAMPLES}") from error
    wrong = ""
    if parts.scheme not in (*BUCKETS, *SERVERS, *LOCAL):
        wrong = f"unknown kind {parts.scheme!r}" if parts.scheme else "it is no URL"
    elif parts.scheme in (*BUCKETS, *SERVERS) and not parts.netloc:
        wrong = "it names no bucket" if parts.scheme in BUCKETS else "it names no server"
    elif parts.scheme == "file" and (parts.netloc or len(parts.path) < 2):
        wrong = "it names no absolute directory"
    elif parts.fragment:
        wrong = f"what is {parts.fragment!r}?"
    if wrong:
        raise ValueError(f"{url!r}: {wrong}; it must be like {EXAMPLES}")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in URL_SETTINGS:
            known = " and ".join(URL_SETTINGS)
            raise ValueError(f"{url!r}: unknown setting {name!r}; known: {known}")
        if not value:
            raise ValueError(f"{url!r}: setting {name!r} is empty")
