"""A toy service for each test, and no default backend left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from statewise.frontend import RuntimeEndpoint, set_default_backend
from support.fake_service import FakeService


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService() as running:
        endpoint = RuntimeEndpoint(running.url)
        set_default_backend(endpoint)
        yield running
        set_default_backend(None)
        endpoint.close()
