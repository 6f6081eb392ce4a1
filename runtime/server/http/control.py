"""Routes about the server itself: health, what is served, load, cache, counters, tokens.

Health is answered from what the supervisor knows, so that it is cheap and true: a dead scheduler
is 503 within a second, and a thousand probes cost the scheduler nothing. Load comes from its last
heartbeat.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from statewise import __version__
from statewise.runtime.errors import InvalidRequestError, RefusedError
from statewise.runtime.server import links
from statewise.runtime.server import requests as checks
from statewise.runtime.server.http.json_io import JsonResponse, read_body, read_json
from statewise.runtime.server.metrics import CONTENT_TYPE, usage_of
from statewise.runtime.server.service import Service

MAX_TOKENIZE_TEXTS = 1024


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# ----------------------------------------------------------------- health


async def health(request: Request) -> Response:
    """200 while requests are taken, 503 otherwise, with one word why."""
    service = _service(request)
    status = 200 if service.is_serving else 503
    headers = {} if service.is_serving else {"Retry-After": "1"}
    return JsonResponse({"status": service.state}, status_code=status, headers=headers)


async def health_generate(request: Request) -> Response:
    """200 once a token was generated; probes at the same time share one."""
    await _service(request).probe()
    return JsonResponse({"status": "serving"})


# ----------------------------------------------------------------- what is served


async def models(request: Request) -> Response:
    """List the served models, in the OpenAI shape: one."""
    return JsonResponse({"object": "list", "data": [_model(_service(request))]})


async def model(request: Request) -> Response:
    """Describe one model in the OpenAI shape."""
    service = _service(request)
    if request.path_params["name"] != service.model_name:
        raise HTTPException(404, f"no such model; {service.model_name!r} is served")
    return JsonResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.clock.wall()),
        "owned_by": "statewise",
        "root": service.args.model_path,
        "max_model_len": service.info(links.SCHEDULER).get("max_sequence_len"),
    }


async def model_info(request: Request) -> Response:
    """Describe the served model: limits, chat template, special tokens."""
    service = _service(request)
    facts = {"vocab_size": service.vocab_size, **service.info(links.SCHEDULER)}
    facts.pop("lines", None)  # the start log
    return JsonResponse(
        {
            "model_path": service.args.model_path,
            "tokenizer_path": service.args.tokenizer_path or service.args.model_path,
            "served_model_name": service.model_name,
            "is_generation": True,
            "weight_version": service.args.weight_version,
            **service.info(links.TOKENIZER),
            **facts,
        }
    )


async def server_info(request: Request) -> Response:
    """Return settings (no secrets), the model, the state of processes and engine."""
    service = _service(request)
    stats = await service.broker.call(links.SCHEDULER, "stats", {})
    model = service.info(links.SCHEDULER)
    assert service.supervisor is not None
    processes = {
        name: {"incarnation": p.incarnation, "ready": p.is_ready}
        for name, p in service.supervisor.processes.items()
    }
    return JsonResponse(
        {
            **service.public_settings(),
            **{name: model[name] for name in ("page_size",) if name in model},  # as chosen
            "version": __version__,
            "served_model_name": service.model_name,
            "status": service.state,
            "processes": processes,
            "num_restarts": service.supervisor.num_restarts,
            "num_open_at_server": service.broker.num_open,
            "model": model,
            "internal_states": [stats],
        }
    )


# ----------------------------------------------------------------- load and cache


def _load(service: Service) -> dict[str, Any]:
    stats = service.load()
    running = stats.get("num_running", 0)
    waiting = stats.get("num_waiting", 0)
    return {
        "dp_rank": 0,
        "num_reqs": running + waiting,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_tokens": stats.get("num_tokens", 0),
        "token_usage": usage_of(stats.get("pools", {})),
    }


async def get_load(request: Request) -> Response:
    """Load as the scheduler last told it."""
    return JsonResponse([_load(_service(request))])


async def loads(request: Request) -> Response:
    """Return the same in the newer shape."""
    service = _service(request)
    return JsonResponse({"version": __version__, "dp_rank_count": 1, "loads": [_load(service)]})


async def flush_cache(request: Request) -> Response:
    """Drop all cached state that no request is using."""
    await read_body(request, _service(request).args.max_body_bytes)
    result = await _service(request).broker.call(links.SCHEDULER, "flush", {})
    return JsonResponse({"success": True, **result})


class AbortBody(msgspec.Struct):
    """Which requests to end."""

    rid: str | None = None
    abort_all: bool = False


async def abort_request(request: Request) -> Response:
    """End the requests with a client's id, or all; each still gets its terminal event."""
    service = _service(request)
    body = await read_json(request, AbortBody, service.args.max_body_bytes)
    if not body.rid and not body.abort_all:
        raise InvalidRequestError("'rid' or 'abort_all' is needed")
    rid = "" if body.abort_all else body.rid or ""
    num = service.broker.abort_client_rid(rid, "aborted by a request")
    return JsonResponse({"aborted": num})


class UpdateWeightsBody(msgspec.Struct):
    """Which weights to go on with."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


async def update_weights(request: Request) -> Response:
    """Go on with other weights of the same architecture; cached state of the old ones is unusable.

    Running requests keep their tokens and go on with the new weights, unless they are to be
    aborted. 400 where the weights cannot be loaded or do not fit; nothing has changed then.
    """
    service = _service(request)
    body = await read_json(request, UpdateWeightsBody, service.args.max_body_bytes)
    try:
        result = await service.update_weights(
            body.model_path, body.weight_version or "", abort_all=body.abort_all_requests
        )
    except InvalidRequestError as error:
        answer = {"success": False, "message": str(error), "num_paused_requests": 0}
        return JsonResponse(answer, status_code=400)
    return JsonResponse({"success": True, "message": "the weights were updated", **result})


# ----------------------------------------------------------------- tokens


class TokenizeBody(msgspec.Struct):
    """Texts to turn into token ids."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct):
    """Token ids to turn into texts."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of each of several."""
    service = _service(request)
    body = await read_json(request, TokenizeBody, service.args.max_body_bytes)
    given = body.prompt if body.prompt is not None else body.text
    if given is None:
        raise InvalidRequestError("'prompt' is needed")
    texts = [given] if isinstance(given, str) else given
    if len(texts) > MAX_TOKENIZE_TEXTS:
        raise InvalidRequestError(f"'prompt' holds more than {MAX_TOKENIZE_TEXTS} texts")
    args = {"texts": texts, "add_special_tokens": body.add_special_tokens}
    answer = await service.broker.call(links.TOKENIZER, "tokenize", args)
    tokens = answer["tokens"]
    shown = tokens[0] if isinstance(given, str) else tokens
    counts = len(shown) if isinstance(given, str) else [len(ids) for ids in tokens]
    limit = service.info(links.SCHEDULER).get("max_sequence_len")
    return JsonResponse({"tokens": shown, "count": counts, "max_model_len": limit})


async def detokenize(request: Request) -> Response:
    """Text of token ids, or of each of several lists."""
    service = _service(request)
    body = await read_json(request, DetokenizeBody, service.args.max_body_bytes)
    is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
    batches: list[Any] = body.tokens if is_batch else [body.tokens]
    if any(not isinstance(ids, list) for ids in batches):
        raise InvalidRequestError("'tokens' mixes token ids and lists of token ids")
    texts = []
    for ids in batches:
        if ids:
            checks.checked_ids("tokens", ids, service.vocab_size)
        args = {"tokens": ids, "skip_special_tokens": body.skip_special_tokens}
        answer = await service.broker.call(links.TOKENIZER, "detokenize", args)
        texts.append(answer["text"])
    return JsonResponse({"text": texts if is_batch else texts[0]})


# ----------------------------------------------------------------- metrics


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus's text format."""
    service = _service(request)
    if not service.args.enable_metrics:
        raise RefusedError("metrics are switched off (--no-enable-metrics)")
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)
