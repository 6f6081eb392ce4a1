"""The HTTP client: reuse, retries, what errors say; and the endpoint over it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import statewise as sw
from statewise.frontend.backends import http
from statewise.frontend.backends.base import Backend, CacheHints, Prompt
from statewise.frontend.backends.http import HttpClient, error_text
from statewise.frontend.errors import BackendError
from statewise.frontend.sampling import SamplingOptions
from support.fake_service import FakeService

REFUSED = {"error": {"message": "queue full", "code": "refused"}}


@pytest.fixture
def client(service: FakeService) -> Any:
    client = HttpClient(service.url)
    yield client
    client.close()


def test_connections_are_reused(service: FakeService, client: HttpClient) -> None:
    for _ in range(3):
        assert client.call("GET", "/anything") == {"status": "serving", "path": "/anything"}
    assert len(client._idle) == 1


def test_a_stale_connection_is_replaced_in_silence(
    service: FakeService, client: HttpClient
) -> None:
    service.close_after_answer = True  # the client learns of it when it sends again
    for _ in range(3):
        assert client.call("GET", "/x")["path"] == "/x"
    assert len(service.bodies("/x")) == 3


def test_refusals_are_retried_and_other_errors_are_not(
    service: FakeService, client: HttpClient
) -> None:
    service.failures += [("/x", 503, {"Retry-After": "0"}, REFUSED)] * 2
    assert client.call("GET", "/x")["path"] == "/x"
    service.failures.append(("/x", 503, {}, REFUSED))
    with pytest.raises(BackendError, match="503 queue full") as caught:
        client.call("GET", "/x")
    assert caught.value.code == "refused"
    service.failures.append(("/x", 500, {"Retry-After": "0"}, "plain words"))
    with pytest.raises(BackendError, match="500 plain words"):
        client.call("GET", "/x")
    service.failures.append(("/x", 503, {"Retry-After": "0"}, REFUSED))
    with pytest.raises(BackendError, match="503"):
        client.call("GET", "/x", retry=False)


def test_refusals_end(service: FakeService, client: HttpClient) -> None:
    service.failures += [("/x", 503, {"Retry-After": "0"}, REFUSED)] * (http.MAX_REFUSALS + 1)
    with pytest.raises(BackendError) as caught:
        client.call("GET", "/x")
    assert caught.value.retry_after_s == 0.0
    assert len(service.bodies("/x")) == http.MAX_REFUSALS + 1


def test_abandoning_a_stream_closes_its_connection(
    service: FakeService, client: HttpClient
) -> None:
    service.script["a"] = "bcdefgh"
    body = {"text": "a", "sampling_params": {}, "stream": True}
    events = client.events("/generate", body)
    assert next(events)["text"] == "b"
    events.close()  # type: ignore[attr-defined]
    assert client._idle == []
    assert [event["text"] for event in client.events("/generate", body)][-1] == "bcdefgh"
    assert len(client._idle) == 1


def test_many_threads_share_a_client(service: FakeService, client: HttpClient) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: client.call("GET", f"/{i}")["path"], range(64)))
    assert answers == [f"/{i}" for i in range(64)]
    assert len(client._idle) <= 16


def test_keys_are_sent(service: FakeService) -> None:
    service.api_key = "secret"
    with pytest.raises(BackendError, match="401 wrong key") as caught:
        sw.RuntimeEndpoint(service.url).get_server_info()
    assert caught.value.code == "unauthorized"
    assert sw.RuntimeEndpoint(service.url, "secret").get_server_info()["status"] == "serving"


def test_urls() -> None:
    assert HttpClient("localhost:1")._port == 1
    assert HttpClient("http://host/base/")._path == "/base"
    with pytest.raises(ValueError, match="not an http"):
        HttpClient("ftp://host")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"error": {"message": "m", "code": "c"}}, ("m", "c")),
        ({"error": "m"}, ("m", "")),
        ({"detail": "m"}, ("m", "")),
        ("text ", ("text", "")),
        ({"other": 1}, ('{"other": 1}', "")),
    ],
)
def test_error_shapes(answer: Any, expected: tuple[str, str]) -> None:
    assert error_text(answer) == expected


def test_endpoint_is_a_backend_and_asks_nothing_before_use(service: FakeService) -> None:
    endpoint = sw.RuntimeEndpoint(service.url)
    assert isinstance(endpoint, Backend)
    assert service.requests == []
    assert endpoint.get_model_name() == "toy"
    assert endpoint.get_model_name() == "toy"
    assert len(service.bodies("/model_info")) == 1
    endpoint.probe_health()
    endpoint.publish("text", CacheHints())
    endpoint.flush_cache()


def test_a_stream_gives_deltas(service: FakeService) -> None:
    service.script["a"] = "bcd"
    endpoint = sw.RuntimeEndpoint(service.url)
    pieces = list(endpoint.stream(Prompt("a"), SamplingOptions(), CacheHints()))
    assert [piece.text for piece in pieces] == ["b", "c", "d"]
    assert pieces[-1].meta_info["finish_reason"]["type"] == "stop"


def test_answers_that_are_no_answers(service: FakeService) -> None:
    endpoint = sw.RuntimeEndpoint(service.url)
    service.failures.append(("/generate", 200, {}, {"unexpected": True}))
    with pytest.raises(BackendError, match="unexpected"):
        endpoint.generate(Prompt("a"), SamplingOptions(), CacheHints())
