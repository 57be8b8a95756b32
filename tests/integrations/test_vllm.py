"""sync_weights where a server refuses, or none is there, over real HTTP and two ranks; no vLLM is needed."""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.export.engines import served_plan, served_tensors
from ds_fp8.integrations import vllm
from tests.export.trained import gather_failing
from tests.integrations.vllm_models import engine_of, refusal
from tests.ranks import on_ranks


class StandIn(ThreadingHTTPServer):
    """A server that answers the calls as vLLM 0.24.0 does, and notes them."""

    daemon_threads = True

    def __init__(
        self,
        refusal: str | None = None,
        development: bool = True,
        paused: bool = False,
        failing: dict[str, str] | None = None,
        seconds_to_pause: float = 0,
    ):
        self.refusal, self.development, self.paused = refusal, development, paused
        self.failing, self.seconds_to_pause = failing or {}, seconds_to_pause
        self.calls: list[str] = []
        self.announced: list = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def answer(self, body):
        server, path = self.server, self.path.partition("?")[0]
        if not server.development:
            return self.send(404, {"detail": "Not Found"})
        server.calls.append(self.path)
        if path == "/is_paused":
            return self.send(200, {"is_paused": server.paused})
        if path in server.failing:
            return self.send(500, {"error": {"message": server.failing[path], "code": 500}})
        if path == "/pause":
            server.paused = True
            time.sleep(server.seconds_to_pause)
        if path == "/resume":
            server.paused = False
        if path == "/init_weight_transfer_engine" and "tensors" in body["init_info"]:
            server.announced = body["init_info"]["tensors"]
            server.granularity = body["init_info"]["granularity"]
            if server.refusal:
                message = f"Call to collective_rpc method failed: {server.refusal}"
                return self.send(500, {"error": {"message": message, "code": 500}})
        return self.send(200, {"message": "done"})

    def send(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


def said(calls: list[tuple[str, dict]], fp8: dict | None = None, **shape: int) -> list[str]:
    """What is said of syncs of one engine to servers."""
    engine = engine_of("llama", fp8 or {}, **shape)
    return [refusal(vllm.sync_weights, engine, url, **{"timeout": 20, **options}) for url, options in calls]


def said_with_buffers(urls: list[str], full: int | None = None) -> list[tuple[str, int]]:
    """The same where buffers can be shared, as on GPUs, with the handles made; rank `full` has no memory."""
    engine, found, made = engine_of("llama", {}), [], []
    vllm._handles = lambda buffer: made.append(buffer.numel()) or {str(dist.get_rank()): []}
    vllm._buffer = vllm.SharedBuffer()
    if dist.get_rank() == full:
        vllm._buffer.filled = lambda *_: torch.empty(1 << 60)
    for url in urls:
        found.append((refusal(vllm.sync_weights, engine, url, timeout=20, chunk_bytes=200_000), len(made)))
    return found


REFUSED = "[ds_fp8] x.weight is [1, 2] in the server [remedy: start it anew]"
# Servers, what they are called with, what all ranks say, and the calls that they get
SERVERS = {
    "a refusal, behind which it goes on": (
        {"refusal": REFUSED},
        {},
        ["x.weight is [1, 2] in the server", "remedy: start it anew"],
        ["/is_paused", "/pause?mode=wait", "/init_weight_transfer_engine", "/resume"],
    ),
    "requests may run": ({}, {"pause": None}, ["POST /pause first"], ["/is_paused"]),
    "paused by the caller": (
        {"refusal": REFUSED, "paused": True},
        {"pause": None},
        ["x.weight is [1, 2]"],
        ["/is_paused", "/init_weight_transfer_engine"],
    ),
    "no development": (
        {"development": False},
        {},
        ["VLLM_SERVER_DEV_MODE=1 in its environment (vLLM 0.22 or later"],
        [],
    ),
    "requests outlast the timeout": (
        {"seconds_to_pause": 2},
        {"timeout": 0.5},
        ["does not answer /pause"],
        ["/is_paused", "/pause?mode=wait", "/resume"],
    ),
}


def test_a_refusal_reaches_all_ranks_and_leaves_a_server_as_it_was(ranks):
    servers = {name: StandIn(**options) for name, (options, *_) in SERVERS.items()}
    calls = [(servers[name].url, {"pause": "wait", **options}) for name, (_, options, *_) in SERVERS.items()]
    for errors in ranks(2, said, calls):
        for (name, (_, _, words, _)), error in zip(SERVERS.items(), errors, strict=True):
            assert all(part in error for part in words), name
    for name, (*_, expected) in SERVERS.items():
        assert servers[name].calls == expected, name
    names = {name: (dtype, shape) for name, dtype, shape in servers["paused by the caller"].announced}
    assert names["model.layers.0.self_attn.q_proj.weight"] == ("float8_e4m3fn", [256, 256])
    assert names["model.layers.0.self_attn.q_proj.weight_scale_inv"] == ("float32", [2, 2])
    assert names["lm_head.weight"] == ("bfloat16", [500, 256])
    time.sleep(2)
    assert not servers["requests outlast the timeout"].paused


@pytest.mark.parametrize(
    ("fp8", "width", "types", "granularity"),
    [
        ({}, 256, {"float8_e4m3fn", "float32", "bfloat16"}, "128x128"),
        ({"preset": "rowwise"}, 256, {"float8_e4m3fn", "float32", "bfloat16"}, "row"),
        ({"preset": "coat"}, 256, {"float8_e4m3fn", "float32", "bfloat16"}, "tensor"),
        ({"preset": "coat", "enabled": False}, 256, {"bfloat16"}, ""),
        ({"preset": "halo"}, 256, {"bfloat16"}, ""),
        ({"preset": "mxfp8"}, 256, {"bfloat16"}, ""),
        ({}, 192, {"bfloat16"}, ""),  # no multiple of 128
    ],
)
def test_weights_that_no_server_reads_in_fp8_are_sent_in_bf16(ranks, fp8, width, types, granularity):
    server = StandIn("[ds_fp8] enough [remedy: none]")
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    ((error,),) = ranks(1, functools.partial(said, fp8=fp8, **shape), [(server.url, {"pause": "wait"})])
    assert "enough" in error
    assert {dtype for _, dtype, _ in server.announced} == types
    assert server.granularity == granularity


def answering(content: bytes) -> str:
    """Return the address of something that answers every request with these bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(content)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def of_http(body: bytes, length: int | None = None, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "does not answer /is_paused"),
        (of_http(b"{}", length=100), "does not answer /is_paused"),
        (of_http(b"no", length=100, status="500 X"), "does not answer /is_paused"),
        (of_http(b"<html>"), "does not answer /is_paused"),
        (of_http(b"{}"), "is not vLLM"),
        (of_http(b"[]"), "is not vLLM"),
        (None, "does not answer /is_paused"),
    ],
)
def test_what_is_no_vllm_is_an_error_about_the_address(monkeypatch, content, words):
    monkeypatch.setattr(vllm.dist, "get_rank", lambda: 0)
    link = vllm.link_to("localhost" if content is None else answering(content), "wait", 20)
    with pytest.raises(UserError, match=words) as caught:
        link.open()
    assert "check the address" in caught.value.remedy


def test_an_error_without_words_has_its_status(monkeypatch):
    monkeypatch.setattr(vllm.dist, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError, match="503"):
        vllm.link_to(answering(of_http(b"", status="503 Service Unavailable")), "wait", 20).open()


BEGINNING = ["/is_paused", "/pause?mode=wait", "/init_weight_transfer_engine", "/start_weight_update"]
PARTS = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def test_failures_on_the_way_are_said_by_all_ranks(ranks):
    servers = {path: StandIn(failing={path: "out of memory"}) for path in PARTS}
    stuck = StandIn(failing={"/resume": "no"})
    for *found, (last, _) in ranks(2, said_with_buffers, [*(server.url for server in servers.values()), stuck.url]):
        for server, (error, _) in zip(servers.values(), found, strict=True):
            assert "out of memory" in error
            assert f"call sync_weights again before it generates; {server.url} stays paused: POST /resume then" in error
        assert f"{stuck.url} stays paused: no" in last
    for path, server in servers.items():  # with a part of the weights it is not resumed
        assert server.calls[:4] == BEGINNING, path
        assert server.calls[-2:] == ["/update_weights", "/finish_weight_update"], path
        assert "/resume" not in server.calls, path
    server = StandIn()
    assert all("RuntimeError" in error for ((error, _),) in ranks(2, said_with_buffers, [server.url], 1))
    assert server.calls == [*BEGINNING, "/update_weights", "/finish_weight_update"]  # both of them to undo it


def test_a_rank_has_one_buffer_for_all_chunks_and_an_update_that_another_left_is_ended_first(ranks):
    server = StandIn()
    assert ranks(2, said_with_buffers, [server.url] * 2) == [[("accepted", 1)] * 2] * 2
    assert server.calls.count("/update_weights") > 10
    assert server.calls[-3:] == ["/finish_weight_update", "/init_weight_transfer_engine", "/resume"]
    server = StandIn(paused=True, failing={"/start_weight_update": "a weight update is already active"})
    ranks(1, said_with_buffers, [server.url])
    start = "/start_weight_update"
    assert server.calls[1:5] == ["/init_weight_transfer_engine", start, "/finish_weight_update", start]


@on_ranks(1)
def test_adapters_and_a_vllm_of_another_version():
    engine = engine_of("llama", {})
    engine.module.peft_config = {}
    assert "--enable-lora" in refusal(vllm.sync_weights, engine, "http://127.0.0.1:1")
    del engine.module.peft_config
    version = refusal(vllm.sync_weights, engine, object())
    assert "no LLM.init_weight_transfer_engine" in version
    assert "vLLM 0.22" in version


def gathers_that_fail(url: str, where: str) -> tuple[str, list[str]]:
    """Sync to this process's own LLM, or to a server; the second rank fails in its third gather."""
    vllm._handles = lambda buffer: {}
    llm, engine, said = mock.Mock(), engine_of("llama", {}), []
    llm.llm_engine.has_unfinished_requests.return_value = False
    for server in (llm, url):
        with gather_failing(engine, where), pytest.raises(UserError) as caught:
            vllm.sync_weights(engine, server, chunk_bytes=1, timeout=20)
        said.append(str(caught.value))
    vllm.sync_weights(engine, llm)
    return said, [call[0] for call in llm.method_calls]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["codes", "bf16"])
def test_a_rank_that_fails_in_a_gather_ends_the_update_on_all(ranks, what, when):
    server = StandIn()
    for said, calls in ranks(2, gathers_that_fail, server.url, f"gather of {what} {when}"):
        assert all("rank 1 failed while weights were unsharded: OutOfMemoryError" in words for words in said)
        assert all("call sync_weights again before it generates" in words for words in said)
        assert calls[-3:] == ["finish_weight_update", "init_weight_transfer_engine", "reset_prefix_cache"]
    assert "/resume" not in server.calls


@on_ranks(1)
def test_a_chunk_is_bounded_and_its_tensors_come_back_from_one_buffer():
    engine, made = engine_of("llama", {}), []
    vllm._handles = lambda buffer: made.append(buffer.numel()) or {"GPU": [buffer.numel()]}
    plan, buffer = served_plan(engine), vllm.SharedBuffer()
    expected = dict(served_tensors(engine, plan))
    for chunk, failure in vllm._chunks(engine, plan, 100_000):
        assert failure is None
        assert len(chunk) == 1 or sum(vllm.padded(tensor) for _, tensor in chunk) <= 100_000
        filled = buffer.filled(chunk, vllm._buffer_bytes(plan, 100_000))
        assert filled["handles"] == {"GPU": [buffer.memory.numel()]}
        for (name, _), (own, dtype, shape, start) in zip(chunk, filled["parts"], strict=True):
            tensor = expected.pop(name)
            back = buffer.memory[start : start + tensor.nbytes].view(getattr(torch, dtype)).view(shape)
            assert own == name
            assert torch.equal(back.float(), tensor.float())
    assert not expected
    assert len(made) == 1
