"""vLLM servers as a backend: token ids over HTTP, one request a reply, adapters loaded by version.

The endpoint is `POST /inference/v1/generate` of `vllm serve --tokens-only`, which takes vLLM's SamplingParams as
they are. Requests go round several servers; where one doesn't answer, the next is asked: a request holds its
seed, so asking again is safe.
"""

import http.client
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmppo.config import VLLMConfig
from llmppo.engines.vllm import Adapter, Completion
from llmppo.errors import EngineError

UNIX = "unix:"
API_KEY = (
    "VLLM_API_KEY"  # vLLM's own variable: what its server asks for, and what we send to servers of others
)
POLL_S = 0.25
HEALTH_S = 10.0  # for a server to say that it is well


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def key_file(url: str) -> Path | None:
    """Where the key of a server of this run's own is, beside its socket."""
    return Path(url.removeprefix(UNIX)).with_suffix(".key") if url.startswith(UNIX) else None


def _headers(url: str) -> dict[str, str]:
    file = key_file(url)
    own = file is not None and file.is_file()
    key = file.read_text(encoding="utf-8") if file is not None and own else os.environ.get(API_KEY)
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def call(url: str, method: str, path: str, body: Any = None, *, timeout: float) -> tuple[int, str]:
    """Status and text of one request to a server at `http://host:port` or `unix:/path`. Raises OSError."""
    connection: http.client.HTTPConnection
    if url.startswith(UNIX):
        connection, prefix = _UnixConnection(url.removeprefix(UNIX), timeout), ""
    else:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection, prefix = kind(parts.netloc, timeout=timeout), parts.path.rstrip("/")
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, prefix + path, text, _headers(url))
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"broken answer ({error!r})") from error
    finally:
        connection.close()


def is_healthy(url: str) -> bool:
    try:
        return call(url, "GET", "/health", timeout=HEALTH_S)[0] == 200
    except OSError:
        return False


def wait_until_healthy(url: str, seconds: float) -> None:
    """Return once the server answers. Raises EngineError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_healthy(url):
        if time.monotonic() > deadline:
            raise EngineError(f"{url}: no healthy vLLM server within {seconds:.0f} s (startup_timeout_s)")
        time.sleep(POLL_S)


class Servers:
    """A backend of one or several servers of the same base model."""

    def __init__(self, urls: Sequence[str], config: VLLMConfig) -> None:
        self.urls, self._config = [url.rstrip("/") for url in urls], config
        self._loaded: set[str] = set()
        for url in self.urls:
            wait_until_healthy(url, config.startup_timeout_s)

    def complete(
        self, requests: Sequence[tuple[list[int], Mapping[str, Any]]], adapter: Adapter | None
    ) -> list[Completion]:
        if adapter is None:
            raise EngineError("a server needs an adapter; the base model's is one of zeros")
        if adapter.name not in self._loaded:
            for url in self.urls:
                self._load(url, adapter)
            self._loaded.add(adapter.name)
        numbers = range(len(requests))
        with ThreadPoolExecutor(min(len(requests), self._config.max_num_seqs * len(self.urls))) as pool:
            return list(pool.map(lambda number: self._one(number, *requests[number], adapter), numbers))

    def _load(self, url: str, adapter: Adapter) -> None:
        """Load a version; the name says what is in it, so one that is there already is the same."""
        status, text = call(
            url,
            "POST",
            "/v1/load_lora_adapter",
            {"lora_name": adapter.name, "lora_path": str(adapter.path)},
            timeout=self._config.request_timeout_s,
        )
        _require_key(url, status)
        if status != 200 and "already been loaded" not in text:
            raise EngineError(
                f"{url}: {adapter.path} can't be loaded ({status}: {_message(text)}); the server must see this path, "
                "and be started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
            )

    def _one(self, number: int, ids: list[int], fields: Mapping[str, Any], adapter: Adapter) -> Completion:
        body = {
            "model": adapter.name,
            "token_ids": ids,
            "sampling_params": dict(fields),
            "cache_salt": adapter.name,
        }
        faults = []
        for turn in range(len(self.urls)):
            url = self.urls[(number + turn) % len(self.urls)]
            try:
                status, text = call(
                    url, "POST", "/inference/v1/generate", body, timeout=self._config.request_timeout_s
                )
            except OSError as error:
                faults.append(f"{url}: {error}")
                continue
            if status == 200:
                return _completion(json.loads(text))
            _require_key(url, status)
            faults.append(f"{url}: {status}, {_message(text)}")
            if status < 500:
                break
        raise EngineError("no vLLM server answers: " + "; ".join(faults))


def _require_key(url: str, status: int) -> None:
    if status == HTTPStatus.UNAUTHORIZED:
        raise EngineError(
            f"{url}: the server asks for another API key; set {API_KEY} to it in the environment"
        )


def _message(text: str) -> str:
    """The server's own words in an error answer."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text[:500]


def _completion(answer: Mapping[str, Any]) -> Completion:
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"] or []
    if [entry["token_id"] for entry in content] != choice["token_ids"]:
        raise EngineError("a vLLM server answered with log-probs of other tokens than it sampled")
    # `top_logprobs` may leave out the sampled token; it is always a candidate.
    candidates = [
        {likely["token_id"]: likely["logprob"] for likely in entry["top_logprobs"]}
        | {entry["token_id"]: entry["logprob"]}
        for entry in content
    ]
    return Completion(
        choice["token_ids"],
        [entry["logprob"] for entry in content],
        candidates,
        choice["finish_reason"] or "nothing",
    )
