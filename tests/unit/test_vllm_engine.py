"""The vLLM engine without vLLM: what it asks for, how answers become generations, servers, and their lives."""

import json
import socketserver
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch

from llmppo.config import SamplingConfig, VLLMConfig
from llmppo.engines import vllm_server
from llmppo.engines.base import GenerationRequest
from llmppo.engines.stops import StopStrings
from llmppo.engines.vllm import (
    Adapter,
    Completion,
    VLLMEngine,
    engine_arguments,
    require_vllm,
    sampling_fields,
)
from llmppo.engines.vllm_client import Servers
from llmppo.engines.vllm_plugin import bgmv_expand, bgmv_expand_slice, bgmv_shrink
from llmppo.engines.vllm_server import awake, options
from llmppo.errors import ConfigError, EngineError, NonFiniteError
from llmppo.files import write_json
from llmppo.trajectories.episode import StopReason

REQUEST = GenerationRequest(token_ids=[5, 6, 7], seed=2**62 + 1, max_new_tokens=9, min_new_tokens=2)
ADAPTER = Adapter("policy-00000012abcdef", Path("/policies/1/actor"))


def test_every_field_of_a_request_is_said():
    sampling = SamplingConfig(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, logit_bias={3: 2.0, 8: -1.0})
    fields = sampling_fields(REQUEST, sampling, {9, 2}, greedy=False)
    said = {
        "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 2**62 + 1, "max_tokens": 9, "min_tokens": 2,
        "stop_token_ids": [2, 9], "ignore_eos": True, "stop": [], "n": 1, "logprobs": 4, "detokenize": False,
    }  # fmt: skip
    assert fields | said == fields
    # Added before vLLM divides by the temperature: (logits + 1) / 0.5 is logits / 0.5 + 2.
    assert fields["logit_bias"] == {3: 1.0, 8: -0.5}
    assert json.loads(json.dumps(fields))["seed"] == 2**62 + 1
    greedy = sampling_fields(REQUEST, sampling, {2}, greedy=True)
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"], greedy["min_p"]) == (0.0, 0, 1.0, 0.0)


class Scripted:
    def __init__(self, *completions):
        self.completions, self.asked = completions, []

    def complete(self, requests, adapter):
        self.asked.append((requests, adapter))
        return list(self.completions)


def reply_of(completion, greedy=False, **sampling):
    engine = VLLMEngine(Scripted(completion), ADAPTER, {2}, SamplingConfig(**sampling))
    return engine.generate([REQUEST], greedy=greedy)[0]


class Letters:
    """Token k is the k-th letter."""

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + k) for k in ids)


def test_a_stop_string_cuts_the_reply_where_it_is_complete():
    answer = Completion([3, 4, 5, 6, 2], [-0.1, -0.2, -0.3, -0.4, -0.5], [{}] * 5, "stop")  # defgc

    def stopped(*texts, request=REQUEST):
        sampling = SamplingConfig(stop=list(texts))
        engine = VLLMEngine(Scripted(answer), ADAPTER, {2}, sampling, StopStrings(sampling.stop, Letters()))
        return engine.generate([request])[0]

    reply = stopped("zz", "ef")
    assert (reply.token_ids, reply.stop_reason) == ([3, 4, 5], StopReason.STOP)
    np.testing.assert_allclose(reply.logprobs, [-0.1, -0.2, -0.3])
    assert stopped("zz").stop_reason is StopReason.EOS
    assert stopped("gc").stop_reason is StopReason.EOS  # the end token completes it
    late = replace(REQUEST, min_new_tokens=4)
    assert stopped("ef", "g", request=late).token_ids == [3, 4, 5, 6]


def test_an_answer_becomes_a_generation():
    likely = [{7: -0.1, 4: -2.4, 1: -np.inf}, {2: -0.5, 9: -0.9, 3: -9999.0}]
    answer = Completion([7, 2], [-0.1, -0.5], likely, "stop")
    reply = reply_of(answer, top_k=3)
    assert (reply.token_ids, reply.stop_reason) == ([7, 2], StopReason.EOS)
    assert [support.tolist() for support in reply.supports] == [[4, 7], [2, 9]]
    np.testing.assert_allclose(reply.logprobs, [-0.1, -0.5])
    assert reply_of(answer).supports is None
    assert reply_of(Completion([7, 3], [-0.1, -0.5], likely, "length")).stop_reason is StopReason.LENGTH
    assert np.isnan(reply_of(answer, greedy=True, temperature=0.7).logprobs).all()
    np.testing.assert_allclose(reply_of(answer, greedy=True).logprobs, [-0.1, -0.5])


@pytest.mark.parametrize("value", [np.nan, -9999.0, -np.inf])
def test_faults_of_a_reply_are_named(value):
    with pytest.raises(NonFiniteError, match="token 1 of reply 0"):
        reply_of(Completion([7, 2], [-0.1, value], [{}, {}], "stop"))
    with pytest.raises(EngineError, match="abort"):
        reply_of(Completion([7], [-0.1], [{}], "abort"))
    with pytest.raises(ConfigError, match=r"0\.01"):
        reply_of(None, temperature=0.005)


def test_arguments_of_the_engine(tmp_path):
    write_json(tmp_path / "config.json", {"dtype": "bfloat16"})
    write_json(tmp_path / "manifest.json", {})

    def arguments(device, rank=16, **settings):
        return engine_arguments(
            tmp_path, VLLMConfig(**settings), device=device, lora_rank=rank, max_model_len=64, candidates=7
        )

    cpu = arguments("cpu", cpu_cache_gib=2)
    assert (cpu["dtype"], cpu["max_lora_rank"], cpu["max_logprobs"]) == ("bfloat16", 16, 7)
    assert (cpu["logprobs_mode"], cpu["generation_config"]) == ("processed_logprobs", "vllm")
    assert cpu["kv_cache_memory_bytes"] == 2 * 2**30
    assert arguments("cpu", dtype="float32")["dtype"] == "float32"
    assert [arguments("cpu", rank)["max_lora_rank"] for rank in (1, 8, 9, 300)] == [8, 8, 16, 320]
    cuda = arguments(
        "cuda", sleep_mode=True, mode="server", gpu_memory_utilization=0.5, tensor_parallel_size=2
    )
    assert cuda["gpu_memory_utilization"] == 0.5
    assert cuda["tensor_parallel_size"] == 2
    assert cuda["enable_sleep_mode"] is True
    assert "kv_cache_memory_bytes" not in cuda
    with pytest.raises(ConfigError, match="rank 513"):
        arguments("cpu", 513)
    assert options({"model": "/m", "enable_lora": True, "enforce_eager": False, "max_loras": 2}) == [
        "/m", "--enable-lora", "--no-enforce-eager", "--max-loras", "2",
    ]  # fmt: skip


@pytest.mark.parametrize("slots", [[1, 1, 1], [0, 1, 0], [-1, 1, -1], [-1, -1, -1]])
def test_adapters_by_slot(slots):
    """Against one product a row; a row without an adapter is left as it was."""
    generator = torch.Generator().manual_seed(0)
    inputs, down = torch.randn(3, 6, generator=generator), torch.randn(2, 1, 4, 6, generator=generator)
    up, before = torch.randn(2, 1, 5, 4, generator=generator), torch.randn(3, 9, generator=generator)
    expected = before.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[row, 2:7] += 0.5 * up[slot, 0] @ (down[slot, 0] @ inputs[row])
    middle, output = torch.empty(3, 4), before.clone()
    bgmv_shrink(inputs, down, middle, torch.tensor(slots), 0.5)
    bgmv_expand_slice(middle, up, output, torch.tensor(slots), 2, 5)
    torch.testing.assert_close(output, expected)
    wide = torch.zeros(3, 7)
    bgmv_expand(middle, up, wide, torch.tensor(slots), add_inputs=False)
    torch.testing.assert_close(wide[:, :5], output[:, 2:7] - before[:, 2:7])


def test_settings_that_contradict_each_other():
    for settings in (
        {"urls": ["http://a:1"]},
        {"sleep_mode": True},
        {"mode": "server", "urls": ["http://a:1"], "sleep_mode": True},
        {"mode": "server", "urls": ["a:1"]},
        {"mode": "server", "urls": ["http://me:secret@a:1"]},
    ):
        with pytest.raises(ValueError, match=r"urls|sleep_mode"):
            VLLMConfig(**settings)


def test_without_vllm_the_way_out_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make vllm"):
        require_vllm()


class FakeServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Speaks what the client needs of vLLM; `log` holds (method, path, body)."""

    daemon_threads = True

    def __init__(self, path):
        self.log, self.status, self.sleeping, self.loaded = [], 200, False, set()
        self.key, self.keys = None, []
        super().__init__(str(path), FakeHandler)


class FakeHandler(BaseHTTPRequestHandler):
    def address_string(self):
        return "socket"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer({"is_sleeping": self.server.sleeping})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(json.loads(body) if body else None)

    def answer(self, body):
        server = self.server
        server.log.append((self.command, self.path, body))
        server.keys.append(self.headers.get("Authorization"))
        status, answer = 200, {"is_sleeping": server.sleeping}
        if server.key and server.keys[-1] != f"Bearer {server.key}" and self.path != "/health":
            status, answer = 401, {"error": "Unauthorized"}
        elif self.path.startswith("/sleep") or self.path == "/wake_up":
            server.sleeping = self.path != "/wake_up"
        elif self.path == "/v1/load_lora_adapter":
            if body["lora_name"] in server.loaded:
                status, answer = 400, {"error": {"message": "The adapter has already been loaded."}}
            server.loaded.add(body["lora_name"])
        elif self.path == "/inference/v1/generate":
            status = server.status
            content = [{"token_id": 7, "logprob": -0.5, "top_logprobs": [{"token_id": 4, "logprob": -1.0}]}]
            choice = {"token_ids": [7], "finish_reason": "length", "logprobs": {"content": content}}
            answer = {"choices": [choice]} if status == 200 else {"error": {"message": "out of order"}}
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(path):
    server = FakeServer(path)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def complete(urls, count=4, **settings):
    servers = Servers(urls, VLLMConfig(mode="server", startup_timeout_s=1, **settings))
    return servers.complete([([5, 6], {"seed": row}) for row in range(count)], ADAPTER)


def test_requests_go_round_servers_that_have_loaded_the_adapter(tmp_path):
    with serving(tmp_path / "a") as a, serving(tmp_path / "b") as b:
        urls = [f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"]
        replies = complete(urls)
        assert [reply.token_ids for reply in replies] == [[7]] * 4
        assert replies[0].candidates == [{4: -1.0, 7: -0.5}]
        for server, seeds in ((a, {0, 2}), (b, {1, 3})):
            bodies = [body for _, path, body in server.log if path == "/inference/v1/generate"]
            assert {body["sampling_params"]["seed"] for body in bodies} == seeds
            assert {(body["model"], body["cache_salt"]) for body in bodies} == {(ADAPTER.name,) * 2}
            loads = [body for _, path, body in server.log if path == "/v1/load_lora_adapter"]
            assert loads == [{"lora_name": ADAPTER.name, "lora_path": "/policies/1/actor"}]
        complete(urls)  # another job: the adapter is there already, under the same name


def test_where_one_server_fails_the_next_is_asked(tmp_path):
    with serving(tmp_path / "a") as a, serving(tmp_path / "b") as b:
        urls = [f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"]
        a.status = 503
        assert len(complete(urls)) == 4
        assert len([1 for _, path, _ in b.log if path == "/inference/v1/generate"]) == 4
        b.status = 503
        with pytest.raises(EngineError, match=r"/a: 503, out of order; .*/b: 503|/b: 503, .*/a: 503"):
            complete(urls)
        a.status = 400  # its own fault: asking elsewhere won't help
        with pytest.raises(EngineError, match="400, out of order"):
            complete(urls[:1])
    with pytest.raises(EngineError, match=r"no healthy vLLM server within 1 s"):
        complete(urls[:1])


def test_a_server_gets_its_key(tmp_path, monkeypatch):
    """That beside the socket of one of our own, else the environment's; never in a log or an error."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    url = f"unix:{tmp_path}/a.sock"
    with serving(tmp_path / "a.sock") as server:
        server.key = "key-of-the-server"
        with pytest.raises(EngineError, match=r"asks for another API key; set VLLM_API_KEY"):
            complete([url])
        assert set(server.keys) == {None}
        monkeypatch.setenv("VLLM_API_KEY", "key-of-another-one")
        with pytest.raises(EngineError, match=r"a\.sock: the server asks for another API key") as refused:
            complete([url])
        assert "key-of" not in str(refused.value)
        monkeypatch.setenv("VLLM_API_KEY", "key-of-the-server")
        assert len(complete([url])) == 4
        server.key = vllm_server.new_key(tmp_path / "a.key")
        assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
        assert len(complete([url])) == 4
        assert server.keys[-1] == f"Bearer {server.key}"
        assert vllm_server.new_key(tmp_path / "a.key") != server.key


def test_a_server_sleeps_when_nobody_uses_it(tmp_path):
    url = f"unix:{tmp_path}/a.sock"
    with serving(tmp_path / "a.sock") as server:
        with awake(url):
            assert server.log == []  # without sleep mode
        (tmp_path / "a.sleep").touch()
        server.sleeping = True
        with awake(url):
            assert not server.sleeping
            with awake(url):
                pass
            assert not server.sleeping  # the other job still uses it
        assert server.sleeping
    with awake("http://elsewhere:8000"):
        pass


def test_a_server_ends_with_its_owner(tmp_path):
    """The watch, with a child that waits in place of vLLM."""
    import subprocess
    import sys

    owner = subprocess.Popen(["sleep", "60"])
    code = (
        "import sys, time; from llmppo.engines.vllm_server import _end_with; "
        "_end_with(int(sys.argv[1])); print('up', flush=True); time.sleep(60)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(owner.pid)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout.readline() == b"up\n"
    owner.kill()
    owner.wait()
    assert server.wait(timeout=30) == -15


def test_a_server_that_ends_at_once_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(vllm_server, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_server, "options", lambda arguments: ["--no-such-option"])
    monkeypatch.setattr(vllm_server.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"ended with status 1; its output is in .*server\.log"):
        vllm_server.ensure_server(
            {"model": "m"}, device="cpu", threads=1, timeout_s=30, log=tmp_path / "server.log"
        )
