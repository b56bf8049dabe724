"""The engine graphs: passes of fixed shapes against passes of exact ones.

A CUDA graph replays kernels: numbers that Python passed to them, and addresses, are those of the capture. A Tape
does the same with any device's operations, so that all but torch's own capture is tested without a GPU. With one, the
tests whose names end in "cuda" capture for real.
"""

import contextlib
import functools
import gc
import inspect
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from cachedModel import CachedModel
from conftest import tiny_model
from engine import GraphForward, Stack, lean_forward, linear_kind, replace_linears, use_engine
from lively import cacheless
from regrSampling import autoregressive_sampling
from specSampling import (AIMDGamma, NGramDrafter, drafted_sampling, speculative_sampling,
                          speculative_sampling_dynamic, speculative_sampling_multi)
from utils import SamplingParams

SHAPE = dict(vocab=200, hidden=64, layers=3, positions=160)
MODELS = [("llama", {}), ("llama", dict(attention_bias=True)), ("gpt_neox", {}),
          ("gpt_neox", dict(use_parallel_residual=False))]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
         "aten::masked_select", "aten::_unique2", "aten::pin_memory"}


class Tape(TorchDispatchMode):
    """Every operation with the tensors and numbers that it was given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in WAITS, f"{func._schema.name} waits for the device: it cannot be captured"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # to the address of the capture


RECORDED = []


def tape(step, device):
    """engine.record for any device."""
    step()
    with Tape() as calls:
        result = step()
    RECORDED.append(calls)

    def replay():
        calls.replay()
        return result

    return replay


@pytest.fixture
def small(monkeypatch):
    """Buckets, a first buffer and a way to record that suit tiny models on a CPU."""
    monkeypatch.setattr(engine, "COLUMNS", 16)
    monkeypatch.setattr(engine, "ROOM", 20)
    RECORDED.clear()
    if not torch.cuda.is_available():
        monkeypatch.setattr(engine, "record", tape)
        monkeypatch.setattr(engine, "what_is_missing", lambda model, name: None)


def plain(family, options, device="cpu", dtype=torch.float32, **shape):
    """Written-out passes of exact shapes on the layers of the engine graphs."""
    model = tiny_model(family, sharpness=8, **{**SHAPE, **shape}, **options).to(device, dtype)
    replace_linears(model, linear_kind(model, "graphs"))
    model.lean = lean_forward(model, Stack)
    return model


def on_graphs(family, options=None, device="cpu", dtype=torch.float32, seed=0, **shape):
    model = tiny_model(family, seed=seed, sharpness=8, **{**SHAPE, **shape}, **(options or {})).to(device, dtype)
    assert use_engine(model, "graphs") == "graphs"
    assert type(model.lean) is GraphForward
    return model


def some_ids(n, seed=1, device="cpu"):
    return torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(seed)).to(device)


def walk(models, seed, device, close):
    """Feed and roll back at random, up to the end of the context and to one token, the same on both models; `close`
    compares the logits."""
    rng, ids = random.Random(seed), some_ids(160, seed, device)
    pair = [CachedModel(model) for model in models]
    length = 0
    for _ in range(14):
        n = min(rng.choice([1, 1, 2, 3, 5, 9, 10, 16, 17, 18, 40, 65, 66, 90, 160]), 160 - length)
        if n:
            keep, length = rng.randint(1, n), length + n
            close(*(model.forward(ids[:length], keep) for model in pair))
        if rng.random() < 0.5:
            length = rng.choice([rng.randint(0, length), max(0, length - rng.randint(0, 9))])
            ids = torch.cat((ids[:length], some_ids(160 - length, rng.random().__hash__() % 2**31, device)))
            for model in pair:
                model.rollback(length)
    assert pair[0].kv.capacity == 160


def within(tolerance):
    def close(a, b):
        assert a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max()

    return close


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family,options", MODELS)
def test_fixed_shapes_give_the_logits_of_exact_ones(small, family, options, device):
    graphs, exact = on_graphs(family, options, device), plain(family, options, device)
    for seed in range(6):  # the later ones with the graphs, and the stale columns, of the ones before
        walk((graphs, exact), seed, device, within(4e-6))
    assert graphs.lean.fault is None
    widths = {width for passes in graphs.lean.passes.values() for _, width in passes.replays}
    assert widths >= {32, 64, 128, 160}


def path_to(parents, node):
    return path_to(parents, parents[node]) + [node] if node >= 0 else []


def grow(models, seed, device, close):
    """Trees, some of them chains, behind a sequence that any path of them is added to, up to the end of the context;
    the same on both models. `close` compares logits and features."""
    rng, ids = random.Random(seed), some_ids(3, seed, device)
    pair = [CachedModel(model) for model in models]
    for model in pair:
        model.keep_features()
    while len(ids) < 158:
        parents = [rng.randint(-1, i - 1) for i in range(rng.choice([0, 1, 3, 9, 30, 64, 70]))]
        room = 160 - len(ids)
        parents = parents[: next((i for i in range(len(parents)) if len(path_to(parents, i)) > room), None)]
        tokens = some_ids(len(parents), rng.randint(0, 2**31), device)
        close(*(model.forward_tree(ids, tokens, parents) for model in pair))
        path = path_to(parents, rng.randint(-1, len(parents) - 1))
        for model in pair:
            model.keep_path(len(ids), path)
        more = some_ids(rng.choice([1, 1, 1, 2, 30]), rng.randint(0, 2**31), device)
        ids = torch.cat((ids, tokens[path], more))[:160]
        if rng.random() < 0.3:
            close(*(model.forward(ids) for model in pair))
        close(*(model.features for model in pair))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family,options", MODELS)
def test_trees_and_features_of_fixed_shapes_are_those_of_exact_ones(small, family, options, device):
    graphs, exact = on_graphs(family, options, device), plain(family, options, device)
    for seed in range(5):
        grow((graphs, exact), seed, device, within(4e-6))
    assert graphs.lean.fault is None
    assert {rows for passes in graphs.lean.passes.values() for rows, _ in passes.replays} >= {1, 2, 4, 17, 33, 65}


def test_a_tree_needs_no_graph_of_its_own(small):
    model, ids, parents = CachedModel(on_graphs("llama")), some_ids(12), (-1, 0, 0)
    model.forward(ids[:8])
    model.forward(ids, keep=4)
    RECORDED.clear()
    tree = model.forward_tree(ids[:9], ids[9:], parents)
    passes, written = model.lean.passes_over(model.kv), []
    assert not RECORDED and passes.tree == (4, parents)
    write, passes.among = passes.among, SimpleNamespace(copy_=written.append)
    assert torch.equal(model.forward_tree(ids[:9], ids[9:], parents), tree) and not written  # what stands there is left
    passes.among = write
    chain = model.forward(ids, keep=4)
    assert passes.tree == (0, ()) and torch.equal(chain[:2], tree[:2]) and not torch.equal(chain[3], tree[3])


@pytest.mark.parametrize("family,options", MODELS)
def test_transformers_pass_without_a_cache_agrees(small, family, options):
    oracle, ids = tiny_model(family, sharpness=8, **SHAPE, **options), some_ids(70)
    graphs = CachedModel(on_graphs(family, options))
    expected = cacheless(oracle, ids.tolist())
    for end in (1, 2, 10, 11, 44, 66, 70):
        keep = min(end, 9)
        graphs.rollback(end - keep)
        within(4e-6)(graphs.forward(ids[:end], keep), expected[end - keep : end])


def decoders(target, draft, prompt, params):
    return [autoregressive_sampling(target, prompt, params), speculative_sampling(target, draft, prompt, params, 3),
            speculative_sampling_dynamic(target, draft, prompt, params, AIMDGamma(4)),
            speculative_sampling_multi(target, [NGramDrafter(3), draft], prompt, params),
            drafted_sampling(target, NGramDrafter(12), prompt, params)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_greedy_ids_are_those_of_eager_up_to_the_end_of_the_context(small, family, device):
    target, draft = on_graphs(family, device=device), on_graphs("llama", device=device, seed=1)
    eager = tiny_model(family, sharpness=8, **SHAPE).to(device)
    for prompt, tokens in (([5, 6, 7, 5, 6], 60), (some_ids(100).tolist(), 100)):
        params = SamplingParams(temperature=0, max_new_tokens=tokens)
        expected = autoregressive_sampling(eager, prompt, params)
        for run in decoders(target, draft, prompt, params):
            assert run.tokens == expected.tokens and run.finish_reason == expected.finish_reason
    assert expected.finish_reason == "context" and target.lean.fault is None and draft.lean.fault is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_draws_the_same_tokens_with_old_graphs_and_new(small, device):
    target, draft = on_graphs("gpt_neox", device=device), on_graphs("llama", device=device, seed=1)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=40)
    first, *others = [[run.tokens for run in decoders(target, draft, [5, 6, 7], params)] for _ in range(3)]
    assert all(other == first for other in others)


def test_the_next_sequence_takes_over_cache_and_graphs(small):
    model, params = on_graphs("llama"), SamplingParams(temperature=0, max_new_tokens=20)
    first = autoregressive_sampling(model, [5, 6, 7], params).tokens
    assert RECORDED and len(model.lean.passes) == 1
    RECORDED.clear()
    assert autoregressive_sampling(model, [5, 6, 7], params).tokens == first
    assert not RECORDED and len(model.lean.passes) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_that_moved_has_new_graphs(small, device):
    ids, steps = some_ids(301, device=device), (3, 4, 250, 251, 300, 301)
    cached, exact = (CachedModel(make("llama", {}, device, positions=700)) for make in (on_graphs, plain))
    lean, capacities = cached.model.lean, []
    for n in steps:
        within(4e-6)(cached.forward(ids[:n]), exact.forward(ids[:n]))
        capacities.append(cached.kv.capacity)
        assert all(passes.buffer is cached.kv.buffer for passes in lean.passes.values())
    assert capacities == [256, 256, 256, 256, 632, 632] and len(lean.passes) == 1
    assert set(lean.passes_over(cached.kv).replays) == {(65, 512), (1, 512)}


@pytest.mark.parametrize("device", DEVICES)
def test_logits_outlive_the_next_pass(small, device):
    model, ids = CachedModel(on_graphs("llama", device=device)), some_ids(9, device=device)
    logits = [model.forward(ids[:n], keep=2) for n in (4, 6, 8)]
    copies = [rows.clone() for rows in logits]
    model.rollback(6)
    assert not torch.equal(model.forward(torch.cat((ids[:6], ids[:2])), keep=2), copies[-1])
    assert all(map(torch.equal, logits, copies))
    with torch.inference_mode():
        hidden = [model.lean(ids[:2] + i, model.kv, 4, 1)[1] for i in range(2)]
    assert not torch.equal(*hidden)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_of_one_sequence_does_not_reach_the_next(small, device):
    model = on_graphs("llama", device=device)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    cached = CachedModel(model)
    good = cached.forward(some_ids(3, device=device)).clone()
    cached.reset()
    assert cached.forward(torch.full((30,), 7, device=device), keep=30).isnan().all()
    cached.reset()
    assert torch.equal(cached.forward(some_ids(3, device=device)), good)


def test_a_filled_up_pass_ends_before_the_context_does(small):
    """10 tokens are a pass of 17, whose last columns must not lie behind the context's end."""
    model, ids = CachedModel(on_graphs("gpt_neox")), some_ids(160)
    model.forward(ids[:150])
    replays = model.model.lean.passes_over(model.kv).replays
    for end, captured in ((153, True), (154, False), (160, False)):
        replays.clear()
        model.rollback(end - 10)
        model.forward(ids[:end], keep=10)
        assert list(replays) == [(17, 160)] * captured


def test_what_cannot_be_captured_runs_as_it_is(small, monkeypatch):
    tried = []

    def refuse(step, device):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model, exact = on_graphs("llama"), plain("llama", {})
    monkeypatch.setattr(engine, "record", refuse)
    with pytest.warns(UserWarning, match="could not be captured.*not permitted when stream is capturing$"):
        walk((model, exact), 0, "cpu", within(4e-6))
    assert len(tried) == 1
    other = tiny_model("llama", **SHAPE)
    with pytest.warns(UserWarning):
        said = use_engine(other, "graphs")
    assert said == "graphs (passes are not captured: operation not permitted when stream is capturing)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_the_real_capture_says_so():
    model = plain("llama", {})
    forward = GraphForward(model.lean)
    with pytest.warns(UserWarning, match="(?i)cuda"):
        assert "cuda" in forward.trial().lower()
    assert use_engine(tiny_model("llama"), "graphs") == "eager (graphs needs CUDA)"


class Capture:
    """torch.cuda.graph on a Tape; like torch's, it leaves its own stream in place where the capture fails."""

    current = "default"

    def __init__(self, graph, pool=None, stream=None):
        self.graph, self.pool, self.stream = graph, pool, stream

    def __enter__(self):
        assert not gc.isenabled() or self.pool is None
        self.graph.made_with, self.graph.tape = (self.pool, self.stream), Tape()
        self.before, Capture.current = Capture.current, self.stream
        self.graph.tape.__enter__()

    def __exit__(self, kind, *error):
        self.graph.tape.__exit__(kind, *error)
        if kind is None:
            Capture.current = self.before


@pytest.fixture
def pretended(monkeypatch):
    """As much of torch.cuda as a capture calls, on the CPU."""
    class Graph:
        def pool(self):
            return "pool of", self

        def replay(self):
            self.tape.replay()

    streams = iter(["first stream", "second stream"])
    for name, value in dict(CUDAGraph=Graph, graph=Capture, Stream=lambda device: next(streams),
                            device=lambda device: contextlib.nullcontext(), current_stream=lambda: Capture.current,
                            set_stream=lambda stream: setattr(Capture, "current", stream)).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(engine, "arena", functools.cache(engine.Arena))
    return engine.arena(torch.device("cpu"))


def test_a_recorded_step_reads_its_inputs_anew(pretended):
    x, calls = torch.tensor([1.0, 2.0]), []
    replay = engine.record(lambda: calls.append(1) or x * 2 + len(calls), x.device)
    assert len(calls) == 2 and gc.isenabled() and Capture.current == "default"
    x.fill_(5.0)
    assert replay().tolist() == [12.0, 12.0] and len(calls) == 2  # numbers of Python's are those of the capture
    assert pretended.anchor.made_with == (None, "first stream")
    graph = inspect.getclosurevars(replay).nonlocals["graph"]
    assert graph.made_with == (pretended.anchor.pool(), "first stream") and pretended.side == "second stream"


def test_a_capture_that_fails_leaves_all_as_it_was(pretended):
    turns = iter([torch.zeros(1)])
    with pytest.raises(StopIteration):
        engine.record(lambda: next(turns), torch.device("cpu"))
    assert gc.isenabled() and Capture.current == "default"


def test_parts_of_a_layer_run_on_the_second_stream():
    """In the right order: the second stream waits for what it reads, and is waited for."""
    log = []

    class Stream:
        device = None

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            log.append("beside")

        def __exit__(self, *_):
            log.append("back")

    here, patch = Stream("here"), pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(torch.cuda, "current_stream", lambda device: here)
        m.setattr(torch.cuda, "stream", lambda stream: stream)
        both = engine.at_once(lambda: log.append("first") or 1, lambda: log.append("second") or 2, Stream("side"))
    assert both == (1, 2)
    assert log == ["side waits for here", "beside", "second", "back", "first", "here waits for side"]


def test_old_weights_are_not_held_while_layers_are_joined():
    """A joined layer is a copy: the whole model must not be there twice."""
    model, alive = tiny_model("llama", **SHAPE), []
    watched = [weakref.ref(m) for m in model.modules() if type(m) is torch.nn.Linear]
    make = linear_kind(model, "graphs")
    replace_linears(model, lambda ls: alive.append(sum(ref() is not None for ref in watched)) or make(ls))
    assert alive[0] == len(watched) and alive[-1] <= 3 and alive == sorted(alive, reverse=True)


# --------------------------------------------------------------------------------------------- with a GPU only

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


@cuda
@pytest.mark.parametrize("family,options", MODELS)
def test_half_precision_to_rounding_cuda(family, options):
    models = [make(family, options, "cuda", torch.float16) for make in (on_graphs, plain)]
    for seed in range(3):
        walk(models, seed, "cuda", within(2e-2))


@cuda
def test_graphs_of_one_model_do_not_need_those_of_another_cuda():
    """The first capture's scratch memory serves the later ones; the models go one after another."""
    ids = some_ids(30, device="cuda")
    models = [on_graphs(family, device="cuda", seed=seed) for seed in range(4) for family in ("llama", "gpt_neox")]
    cached = [CachedModel(model) for model in models]
    expected = [[one.forward(ids[:n], keep=min(n, 5)) for n in (20, 21, 26)] for one in cached]
    while len(models) > 1:
        del models[0], cached[0], expected[0]
        gc.collect()
        torch.cuda.empty_cache()
        torch.full((1 << 24,), float("nan"), device="cuda")  # whatever was freed is written over
        for one, logits in zip(cached, expected):
            one.rollback(0)
            for n, old in zip((20, 21, 26), logits):
                assert torch.equal(one.forward(ids[:n], keep=min(n, 5)), old)


@cuda
def test_more_models_than_torch_has_streams_cuda():
    ids = some_ids(12, device="cuda")
    kept = CachedModel(on_graphs("llama", device="cuda"))
    expected = kept.forward(ids)
    for seed in range(40):
        CachedModel(on_graphs("gpt_neox", device="cuda", seed=seed, layers=1)).forward(ids)
    kept.rollback(0)
    assert torch.equal(kept.forward(ids), expected)
