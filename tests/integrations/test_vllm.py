"""sync_weights where a server refuses, or none is there, over real HTTP and two ranks; no vLLM is needed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.integrations.vllm_check import compare_tensors
from tests.integrations.vllm_models import engine_of


class StandIn(ThreadingHTTPServer):
    """A server that answers the calls as vLLM 0.24.0 does, and notes them."""

    daemon_threads = True

    def __init__(self, refusal: str | None = None, development: bool = True, paused: bool = False):
        self.refusal, self.development, self.paused = refusal, development, paused
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
        if path == "/pause":
            server.paused = True
        if path == "/resume":
            server.paused = False
        if path == "/init_weight_transfer_engine":
            server.announced = body["init_info"]["tensors"]
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


def said(url: str, pause: str | None) -> str:
    from ds_fp8.integrations.vllm import sync_weights

    try:
        sync_weights(engine_of("llama", {}), url, pause=pause, timeout=20)
    except UserError as error:
        return str(error)
    return "accepted"


def test_a_refusal_reaches_all_ranks_and_the_server_goes_on(ranks):
    server = StandIn("[ds_fp8] x.weight is [1, 2] in the server [remedy: start it anew]")
    for error in ranks(2, said, server.url, "wait"):
        assert "x.weight is [1, 2] in the server" in error
        assert "remedy: start it anew" in error
    assert server.calls == ["/is_paused", "/pause?mode=wait", "/init_weight_transfer_engine", "/resume"]
    names = {name: (dtype, shape) for name, dtype, shape in server.announced}
    assert names["model.layers.0.self_attn.q_proj.weight"] == ("float8_e4m3fn", [256, 256])
    assert names["model.layers.0.self_attn.q_proj.weight_scale_inv"] == ("float32", [2, 2])
    assert names["lm_head.weight"] == ("bfloat16", [500, 256])


def test_a_server_that_runs_requests_is_left_alone(ranks):
    server = StandIn()
    assert all("POST /pause first" in error for error in ranks(2, said, server.url, None))
    assert server.calls == ["/is_paused"]


def test_a_server_that_was_paused_before_stays_so(ranks):
    server = StandIn("[ds_fp8] no [remedy: none]", paused=True)
    ranks(1, said, server.url, None)
    assert server.calls == ["/is_paused", "/init_weight_transfer_engine"]


def test_a_server_without_these_calls_is_named_with_versions(ranks):
    server = StandIn(development=False)
    (error,) = ranks(1, said, server.url, "wait")
    assert "VLLM_SERVER_DEV_MODE=1" in error
    assert "vLLM 0.22 or later" in error


def test_no_server_at_all(ranks):
    server = StandIn()
    server.shutdown()
    server.server_close()
    assert "does not answer" in ranks(1, said, server.url, "wait")[0]


def others_said() -> list[str]:
    from ds_fp8.integrations.vllm import sync_weights

    engine, found = engine_of("llama", {}), []
    engine.module.peft_config = {}
    for server in ("http://127.0.0.1:1", object()):
        try:
            sync_weights(engine, server)
        except UserError as error:
            found.append(str(error))
        engine.module.__dict__.pop("peft_config", None)
    return found


def test_adapters_and_a_vllm_of_another_version(ranks):
    adapters, version = ranks(1, others_said)[0]
    assert "--enable-lora" in adapters
    assert "no LLM.init_weight_transfer_engine" in version
    assert "vLLM 0.22" in version


def test_a_chunk_is_bounded_and_its_tensors_come_back_from_one_buffer():
    from ds_fp8.integrations.vllm import _chunks, packed

    weights = [("a", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.randn(64)), ("d", torch.ones(1))]
    weights[1:1] = [("codes", torch.randn(5, 3).to(torch.float8_e4m3fn))]
    chunks = list(_chunks(weights, 100))
    assert [[name for name, _ in chunk] for chunk in chunks] == [["a", "codes", "b"], ["c"], ["d"]]
    for chunk in chunks:
        buffer, parts = packed(chunk)
        for (name, tensor), (own, dtype, shape, start) in zip(chunk, parts, strict=True):
            back = buffer[start : start + tensor.nbytes].view(getattr(torch, dtype)).view(shape)
            assert own == name
            assert torch.equal(back.float(), tensor.float())


def test_the_check_says_what_it_lacks(tmp_path):
    with pytest.raises(UserError, match="holds no model"):
        main(["export", "--check", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"vLLM is not installed|needs a GPU"):
        main(["export", "--check", str(tmp_path)])


class Served(torch.nn.Module):
    """One layer as vLLM holds it: codes and scales of three stacked layers, and a norm."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, codes, scales, norm):
        super().__init__()
        self.qkv_proj, self.norm = torch.nn.Module(), torch.nn.Module()
        for module, name, tensor in ((self.qkv_proj, "weight", codes), (self.qkv_proj, "weight_scale_inv", scales)):
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.norm.register_parameter("weight", torch.nn.Parameter(norm, requires_grad=False))


@pytest.mark.parametrize(
    ("change", "codes_are", "scales_are"),
    [
        ("none", "equal", "equal"),
        ("codes twice as large, half the scale", "the same numbers in other bytes", "the same numbers in other bytes"),
        ("another code", "in vLLM holds other bytes than", "equal"),
        ("another scale", "equal", "in vLLM holds other bytes than"),
    ],
)
def test_tensors_that_a_server_rewrote_are_told_from_wrong_ones(tmp_path, change, codes_are, scales_are):
    torch.manual_seed(0)
    codes, scales = (torch.randn(384, 256) * 50).clamp(-224, 224).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
    parts = zip(("q_proj", "k_proj", "v_proj"), codes.view(torch.uint8).split(128), scales.split(1), strict=True)
    stored = {"norm.weight": torch.ones(256, dtype=torch.bfloat16)}
    for name, own, scale in parts:
        stored |= {f"{name}.weight": own.view(codes.dtype).clone(), f"{name}.weight_scale_inv": scale.clone()}
    save_file(stored, tmp_path / "model.safetensors")
    held, held_scales = codes.float(), scales.clone()
    if change.startswith("codes"):
        held[128:256, :128] *= 2
        held_scales[1, 0] /= 2
    held[5, 7] = 3 if change == "another code" else held[5, 7]
    held_scales[2, 1] *= 2 if change == "another scale" else 1
    model = Served(held.to(codes.dtype), held_scales, stored["norm.weight"])
    found = compare_tensors(model, tmp_path)
    assert found["norm.weight"] == "equal"
    assert codes_are in found["qkv_proj.weight"]
    assert scales_are in found["qkv_proj.weight_scale_inv"]
