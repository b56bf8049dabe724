"""The loops of engine int8, against the same in torch or in whole numbers, and that a row has the same bits in any
company."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

import kernels


f32 = np.float32
sizes = st.integers(1, 70)
seeds = st.integers(0, 10**6)
few = settings(max_examples=40, deadline=None)
ALONE, TWO = kernels.team(1), kernels.team(2)  # threads


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


def rows(levels, scale, size):
    """What a product takes its rows for."""
    return torch.from_numpy((levels[:, :size].astype(f32) - 128) / 127 * scale[:, None])


def is_levelled(levels, scale, exact, slack=1e-30):
    """Whether levels and scale tell rows [n, d]: to half a level, each by its own largest number."""
    size, largest = exact.shape[1], exact.abs().amax(dim=1)
    apart, scale_apart = (rows(levels, scale, size) - exact).abs(), (torch.from_numpy(scale) - largest).abs()
    half = largest[:, None] * 0.5001 / 127 + slack
    return bool((apart <= half).all() and (scale_apart <= 1e-5 * largest + slack).all())


def near(a, b, tolerance=2e-6):
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-20))


def test_exp():
    for x in np.concatenate((np.linspace(-87, 88, 4001, dtype=f32), numbers(0, 500))):
        apart = abs(kernels.exp(x) / np.exp(np.float64(x)) - 1)
        assert apart < 3e-7 + 1e-7 * abs(x)  # of which the second part is the rounding of x / ln 2
    assert kernels.exp(f32(-1e30)) < 1e-37 and kernels.exp(f32(1e30)) > 1e38 and kernels.exp(f32(0)) == 1


@few
@given(seeds, st.integers(1, 4), sizes, st.booleans(), st.sampled_from([0, 7]))
def test_norm(seed, n, d, centred, e):
    x, weights, shrink = numbers(seed, n, d) * 3, numbers(seed + 1, 2, d), numbers(seed + 3, d + e)
    weights[1] *= centred
    extra, levels, scale = numbers(seed + 2, n, e), np.empty((n, d + e), np.uint8), np.empty(n, f32)
    kernels.levelled_norm(x, weights, f32(1e-5), centred, extra, shrink, levels, scale)
    x, shrink, (weight, bias) = (torch.from_numpy(array).double() for array in (x, shrink, weights))
    theirs = F.layer_norm(x, (d,), weight, bias) if centred else F.rms_norm(x, (d,), weight, eps=1e-5)
    assert is_levelled(levels, scale, torch.cat((theirs, torch.from_numpy(extra)), -1) * shrink)


ACTIVATIONS = {kernels.GATED: lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], kernels.GELU: F.gelu,
               kernels.GELU_TANH: lambda y: F.gelu(y, approximate="tanh"), kernels.RELU: F.relu}


@few
@given(seeds, st.integers(1, 4), sizes, st.sampled_from(sorted(ACTIVATIONS)), st.sampled_from([0.1, 4, 30]))
def test_activation(seed, n, d, kind, size):
    y, shrink = numbers(seed, n, 2 * d if kind == kernels.GATED else d) * f32(size), numbers(seed + 2, d)
    theirs = ACTIVATIONS[kind](torch.from_numpy(y).double()) * torch.from_numpy(shrink)
    levels, scale = np.empty((n, d), np.uint8), np.empty(n, f32)
    kernels.activation(y, kind, ALONE, shrink, levels, scale)
    assert is_levelled(levels, scale, theirs, slack=1e-6)


def test_gelu_is_torchs():
    """Its value, not only to 8 bits: a row of one number has it for its scale."""
    for x in np.concatenate((np.linspace(-6, 6, 601, dtype=f32), numbers(0, 200) * 3)):
        levels, scale = np.empty((1, 1), np.uint8), np.empty(1, f32)
        kernels.activation(np.full((1, 1), x), kernels.GELU, ALONE, np.ones(1, f32), levels, scale)
        assert abs(scale[0] - abs(float(F.gelu(torch.tensor(x).double())))) <= 3e-7 * abs(x) + 1e-30


def test_gate_of_extremes():
    y = np.array([[-1e4, -90, 90, 1e4, 1, 1, 1, 1]], f32)
    kernels.activation(y, kernels.GATED, ALONE, np.ones(4, f32), np.empty((1, 4), np.uint8), np.empty(1, f32))
    assert y[0, :4].tolist() == pytest.approx([0, 0, 90, 1e4], rel=1e-6, abs=1e-30)


# ------------------------------------------------------------------------------------------------------------ products


def told_by(weights, out, size):
    """The levels [out, size] of the Weights of one layer, and the scale [out] of each output."""
    blocks, steps, _ = weights.packed.shape[1:]
    levels = weights.packed[0].reshape(blocks, steps, kernels.WIDE, kernels.DEEP).transpose(0, 2, 1, 3)
    return levels.reshape(blocks * kernels.WIDE, -1)[:out, :size].astype(int), weights.scale[0, :out] * f32(127)


def layer_of(seed, out, size):
    """Weights, and the whole numbers and scales that they stand for. Of every third seed all are of one sign."""
    weight, bias, shrink = numbers(seed, out, size), numbers(seed + 1, out), np.abs(numbers(seed + 2, size)) + f32(0.1)
    weight = np.abs(weight) if seed % 3 == 0 else weight
    weight[0] = 0  # a level of nothing
    weights = kernels.in_levels(weight, bias, shrink)
    return weights, *told_by(weights, out, size), bias, shrink


@few
@given(seeds, st.integers(1, 23), st.integers(1, 70), st.integers(1, 70), st.sampled_from([ALONE, TWO]))
def test_a_product_is_that_of_whole_numbers(seed, n, out, size, team):
    """Of any shape, blocks and tiles full or not. The extremes are the largest sums that 16 bits have to hold."""
    weights, levels, scale, bias, _ = layer_of(seed, out, size)
    x = np.random.default_rng(seed).choice([1, 128, 255, 77], (n, -(-size // 8) * 8)).astype(np.uint8)
    x[:, size:] = 201  # must not count
    row_scale, y = np.abs(numbers(seed + 3, n)), np.full((n, out), np.nan, f32)
    kernels.product(x, row_scale, weights, 0, team, y)
    exact = (x[:, :size].astype(int) - 128) @ levels.T
    expected = exact * (row_scale[:, None].astype(float) * scale / 127) + bias
    assert np.allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (y[:, 0] == bias[0]).all()


@few
@given(seeds, st.sampled_from(["even", "peaked", "alike", "one sign", "few large"]))
def test_weights_are_near_their_levels_and_sums_of_levels_fit(seed, kind):
    out, size = 40, 90
    weight = numbers(seed, out, size)
    weight = {"even": weight, "peaked": weight**3, "alike": np.sign(weight) * f32(0.3), "one sign": np.abs(weight),
              "few large": np.where(np.abs(weight) > 2, 4 * weight, weight)}[kind].astype(f32)
    levels, scale = told_by(kernels.in_levels(weight, np.zeros(out, f32), np.ones(size, f32)), out, size)
    joined = np.pad(levels, ((0, 0), (0, -size % 8))).reshape(out, -1, 2, 2, 2)  # step, pair, of the pair
    sums = [np.maximum(sign * joined, 0).sum(axis=(2, 4)).max() for sign in (1, -1)]
    assert max(sums) * 255 < 2**15 and np.abs(levels).max() <= 63
    largest = np.abs(weight).max(axis=1)
    finest = np.rint(weight / (largest / f32(63))[:, None])
    as_they_are = np.isclose(scale * 63, largest, rtol=1e-6) & (levels == finest).all(axis=1)
    assert as_they_are.any() or kind in ("alike", "one sign")
    error = np.square(levels * scale[:, None] - weight).sum(axis=1)
    few_levels = np.rint(weight / (largest / 32)[:, None]) * (largest / 32)[:, None]  # of which any four fit
    assert (as_they_are | (error <= np.square(few_levels - weight).sum(axis=1) * 1.001)).all()


@pytest.mark.parametrize("scale", [1.0, 3e22, 1e30, 1e-22, 1e-30])
def test_fewer_levels_are_as_near_at_any_scale(scale):
    """Squares of errors left float32's range: a layer of zeros, or the first levels tried."""
    weight = (np.random.default_rng(0).uniform(0.5, 1, (16, 8)) * scale).astype(f32)
    levels, of_output = told_by(kernels.in_levels(weight, np.zeros(16, f32), np.ones(8, f32)), 16, 8)
    assert (np.abs(levels * of_output[:, None].astype(float) - weight) < 0.04 * scale).all()


def test_a_weight_that_is_no_number_is_its_outputs_own_affair():
    weight, y = np.ones((16, 8), f32), np.empty((1, 16), f32)
    weight[5, 0], weight[9, 3] = np.nan, np.inf
    weights = kernels.in_levels(weight, np.zeros(16, f32), np.ones(8, f32))
    kernels.product(np.full((1, 8), 255, np.uint8), np.ones(1, f32), weights, 0, ALONE, y)
    assert np.isnan(y[0, [5, 9]]).all() and np.allclose(np.delete(y[0], [5, 9]), 8.0)


def test_the_largest_sums_do_not_overflow():
    """Alike and of one sign are weights whose levels, and the inputs' 127, add up to the most: in 16 and in 32 bits."""
    for sign in (1, -1):
        weights = kernels.in_levels(np.full((16, 4096), sign, f32), np.zeros(16, f32), np.ones(4096, f32))
        for level in (255, 1):
            y = np.empty((1, 16), f32)
            kernels.product(np.full((1, 4096), level, np.uint8), np.ones(1, f32), weights, 0, ALONE, y)
            assert np.allclose(y, sign * (1 if level == 255 else -1) * 4096, rtol=1e-6)


tile_of_1, tile_of_5 = (kernels.tile_of(rows, avx2=False) for rows in (1, 5))


@njit(fastmath={"reassoc", "contract", "nsz", "arcp"})  # as all of kernels.py
def by_plain_tiles(x, row_scale, weights, y):
    """One block, one row and five, without AVX2."""
    steps = weights.packed.shape[2]
    scale, shift, bias = weights.scale.ctypes.data, weights.shift.ctypes.data, weights.bias.ctypes.data
    rows, w, factor, to = x.ctypes.data, weights.packed.ctypes.data, row_scale.ctypes.data, y.ctypes.data
    tile_of_1(rows, 4 * steps, w, 64, steps, factor, scale, shift, bias, to, 64)
    tile_of_5(rows + 4 * steps, 4 * steps, w, 64, steps, factor + 4, scale, shift, bias, to + 64, 64)


def test_other_machines_compute_the_same_bits():
    weights = layer_of(0, 16, 40)[0]
    x = np.random.default_rng(0).integers(1, 256, (6, 40), dtype=np.uint8)
    row_scale, here, there = np.abs(numbers(1, 6)), np.empty((6, 16), f32), np.empty((6, 16), f32)
    kernels.product(x, row_scale, weights, 0, ALONE, here)
    by_plain_tiles(x, row_scale, weights, there)
    assert np.array_equal(here, there)


@few
@given(seeds, st.integers(2, 20), st.integers(1, 70), sizes)
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_company(seed, n, out, size):
    weights, levels, scale, bias, shrink = layer_of(seed, out, size)
    x, together, before = numbers(seed + 4, n, size), np.empty((n, out), f32), numbers(seed + 4, n, size)
    kernels.linear(x, weights, TWO, together)
    assert np.array_equal(x, before)
    for i in range(n):
        one = np.empty((1, out), f32)
        kernels.linear(x[i : i + 1], weights, ALONE, one)
        assert np.array_equal(one[0], together[i])
    exact = (x * shrink) @ (levels * scale[:, None]).T + bias
    assert np.abs(together - exact).max() <= 0.5 / 127 * (np.abs(x * shrink).max(axis=1)[:, None] * np.abs(
        levels * scale[:, None]).sum(axis=1)).max() + 1e-5


def test_layers_are_stacked_and_taken_apart():
    layers = [layer_of(seed, 20, 12)[0] for seed in range(3)]
    together = kernels.stacked(layers)
    x, y = numbers(9, 4, 12), np.empty((2, 4, 20), f32)
    for i, layer in enumerate(layers):
        view = kernels.of_layer(together, i)
        assert view.packed.base is not None and together.packed.ctypes.data % 64 == 0
        kernels.linear(x, view, ALONE, y[0])
        kernels.linear(x, layer, ALONE, y[1])
        assert np.array_equal(y[0], y[1])


# ----------------------------------------------------------------------------------------------------------- attention


def attention(seed, n, kv_heads, group, size, start, turned, interleaved, among=None):
    """The arguments of kernels.attend, but for the last two, and its output's size."""
    heads = kv_heads * group
    y = numbers(seed, n, (heads + 2 * kv_heads) * size)
    if interleaved:  # query, key and value of each head: as many of one as of the others
        where = [[part * size, 3 * size] for part in range(3)]
    else:
        where = [[0, size], [heads * size, size], [(heads + kv_heads) * size, size]]
    angles = numbers(seed + 1, n, turned // 2)
    columns = numbers(seed + 2, 2, kv_heads, start + n + 3, size)
    if among is None:
        among = np.triu(np.full((n, n), -np.inf, f32), 1)
    return [y, np.array(where), np.cos(angles), np.sin(angles), columns, start, among], heads * size


def in_torch(y, where, cos, sin, columns, start, among):
    """The same in float64: [n, heads * size], and the columns afterwards."""
    y, columns = torch.from_numpy(y).double(), torch.from_numpy(columns).double()
    n, (_, kv_heads, _, size) = len(y), columns.shape
    heads = y.shape[1] // size - 2 * kv_heads
    part = [torch.stack([y[:, at + h * step :][:, :size] for h in range(count)])
            for (at, step), count in zip(where.tolist(), (heads, kv_heads, kv_heads))]
    cos, sin = (torch.from_numpy(table).double() for table in (cos, sin))
    half = cos.shape[1]
    for x in part[:2]:
        a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half], x[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    columns[:, :, start : start + n] = torch.stack(part[1:])
    mask = F.pad(torch.from_numpy(among).double(), (start + n - among.shape[1], 0))
    keys, values = columns[:, :, : start + n].repeat_interleave(heads // kv_heads, dim=1)
    out = F.scaled_dot_product_attention(part[0], keys, values, mask)
    return out.transpose(0, 1).reshape(n, -1), columns


@few
@given(seeds, st.integers(1, 6), st.integers(1, 3), st.integers(1, 5), st.sampled_from([2, 4, 16, 20, 64]),
       st.integers(0, 90), st.booleans(), st.booleans(), st.sampled_from([1, 2, 3]), st.booleans())
def test_attend(seed, n, kv_heads, group, size, start, all_turned, interleaved, threads, of_all):
    how = attention(seed, n, kv_heads, 1 if interleaved else group, size, start, size if all_turned else size // 4 * 2,
                    interleaved)[0]
    if of_all:  # a mask of all columns, at random, and one position for all rows
        how[6] = np.where(np.random.default_rng(seed).random((n, start + n)) < 0.5, 0, -np.inf).astype(f32)
        how[6][:, 0] = 0
        how[2:4] = how[2][:1], how[3][:1]
    expected, columns = in_torch(*how)
    out = np.empty(expected.shape, f32)
    kernels.attend(*how, kernels.team(threads), out)
    assert near(torch.from_numpy(out), expected, 1e-5)
    assert near(torch.from_numpy(how[4]), columns, 1e-6)


@few
@given(seeds, st.integers(2, 9), st.integers(0, 70), st.sampled_from([16, 20]))
def test_a_node_has_the_bits_of_its_own_branch(seed, m, start, size):
    """A tree in one pass, and each path of it as a chain, token by token: columns, attention, all in the same bits."""
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(-1, i)) if i else -1 for i in range(m)]
    among, paths = np.full((m, m), -np.inf, f32), []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
        among[i, paths[-1]] = 0
    how, width = attention(seed, m, 2, 2, size, start, size, False, among)
    out = np.empty((m, width), f32)
    alone = [array.copy() if isinstance(array, np.ndarray) else array for array in how]
    kernels.attend(*how, TWO, out)
    for node, path in enumerate(paths):
        columns = alone[4].copy()
        for depth, i in enumerate(path):
            one = np.empty((1, width), f32)
            kernels.attend(alone[0][i : i + 1].copy(), alone[1], alone[2][i : i + 1], alone[3][i : i + 1], columns,
                           start + depth, np.zeros((1, 1), f32), ALONE, one)
        assert np.array_equal(one[0], out[node])


@few
@given(seeds, st.integers(2, 20), sizes)
def test_a_row_has_the_same_bits_in_any_company(seed, n, d):
    x, weights, shrink = numbers(seed, n, d), numbers(seed + 1, 2, d), numbers(seed + 5, d)
    both, nothing = numbers(seed + 6, n, 2 * d), np.empty((n, 0), f32)

    def norm(rows, levels, scale):
        kernels.levelled_norm(rows, weights, f32(1e-5), True, nothing[: len(rows)], shrink, levels, scale)

    def gate(rows, levels, scale):
        kernels.activation(rows.copy(), kernels.GATED, TWO, shrink, levels, scale)

    for kernel, of_rows in ((norm, x), (gate, both)):
        levels, scale = np.empty((n, d), np.uint8), np.empty(n, f32)
        kernel(of_rows, levels, scale)
        for i in range(n):
            one, one_scale = np.empty((1, d), np.uint8), np.empty(1, f32)
            kernel(of_rows[i : i + 1], one, one_scale)
            assert np.array_equal(one[0], levels[i]) and one_scale[0] == scale[i]


@few
@given(seeds, st.integers(2, 30), st.integers(1, 3), st.integers(1, 4), st.integers(60, 300))
def test_threads_change_no_bit(seed, n, kv_heads, group, start):
    """Of many passes one after another, as a race would show now and then."""
    how, size = attention(seed, n, kv_heads, group, 16, start, 16, False)
    both, shrink = numbers(seed, n, 2 * size), numbers(seed + 2, size)
    weights, x = layer_of(seed, 1200, 64)[0], numbers(seed + 3, n, 64)
    results = []
    for team in (ALONE, TWO, TWO, kernels.team(5), TWO):
        mine = [array.copy() if isinstance(array, np.ndarray) else array for array in how]
        out, levels, scale, y = np.empty((n, size), f32), np.empty((n, size), np.uint8), np.empty(n, f32), np.empty(
            (n, 1200), f32)
        kernels.attend(*mine, team, out)
        kernels.activation(both.copy(), kernels.GATED, team, shrink, levels, scale)
        kernels.linear(x, weights, team, y)
        results.append(tuple(array.tobytes() for array in (out, levels, scale, y, mine[4])))
    assert len(set(results)) == 1


def test_without_openmp_there_is_one_thread(monkeypatch):
    def none(name):
        raise OSError

    monkeypatch.setattr(kernels.ctypes, "CDLL", none)
    team = kernels.team.__wrapped__(4)
    assert team[kernels.THREADS] == 1
    how, size = attention(0, 20, 2, 3, 16, 90, 16, False)
    out = np.empty((2, 20, size), f32)
    for i, mine in enumerate((team, TWO)):
        again = [x.copy() if isinstance(x, np.ndarray) else x for x in how]
        kernels.attend(*again, mine, out[i])
    assert np.array_equal(out[0], out[1])


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_rounded_away(odd):
    """As a whole number of 8 bits it would be one: the row's scale tells of it, and no other row's."""
    x, y = numbers(0, 3, 40), np.empty((3, 8), f32)
    x[1, 17] = odd
    kernels.linear(x, layer_of(0, 8, 40)[0], ALONE, y)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_a_row_of_zeros_is_levelled():
    levels, scale = np.empty((1, 8), np.uint8), np.empty(1, f32)
    kernels.level(np.zeros(8, f32), np.ones(8, f32), levels, scale, 0)
    assert (levels == 128).all() and 0 < scale[0] < 1e-20


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_nan_and_infinity_go_through_the_activation(kind):
    y = np.ones((4, 8), f32)
    y[0, 1], y[1, 3], y[2, 2] = np.nan, -np.nan, np.inf
    assert np.isnan(kernels.exp(f32(np.nan)))
    d = 4 if kind == kernels.GATED else 8
    levels, scale = np.empty((4, d), np.uint8), np.empty(4, f32)
    kernels.activation(y, kind, ALONE, np.ones(d, f32), levels, scale)
    assert np.isnan(scale).tolist() == [True, True, True, False]


@pytest.mark.parametrize("size", [16, 20])
def test_a_nan_is_seen_by_those_who_look_at_it(size):
    """Not by earlier tokens, nor by another branch: the nodes 0 and 1 are children of the text, 2 is one of 0."""
    for nan in (np.nan, -np.nan):
        among = np.full((3, 3), -np.inf, f32)
        among[[0, 1, 2, 2], [0, 1, 0, 2]] = 0
        how, width = attention(0, 3, 2, 2, size, 9, size, False, among)
        how[0][0] = nan
        out = np.empty((3, width), f32)
        kernels.attend(*how, ALONE, out)
        assert np.isnan(out).any(axis=1).tolist() == [True, False, True] and np.isfinite(out[1]).all()


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(tmp_path):
    """As for a project in a folder that is read-only, whose user has no folder of his own."""
    (tmp_path / "kernels.py").write_text(Path(kernels.__file__).read_text())
    (tmp_path / "__pycache__").write_text("no folder")
    nowhere = dict(os.environ, HOME=str(tmp_path / "kernels.py"), XDG_CACHE_HOME=str(tmp_path / "kernels.py"))
    nowhere.pop("NUMBA_CACHE_DIR", None)
    code = "import kernels; print(kernels.exp(kernels.f32(0)), type(kernels.exp._cache).__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=nowhere, capture_output=True, text=True)
    assert done.stdout.split() == ["1.0", "NullCache"], done.stderr


PRODUCT = """
import numpy as np
from test_kernels import ALONE, kernels
x, w = np.random.default_rng(0).standard_normal((2, 300, 300)).astype(np.float32)
y = np.empty((300, 300), np.float32)
kernels.linear(x, kernels.in_levels(w, np.zeros(300, np.float32), np.ones(300, np.float32)), ALONE, y)
print(np.abs(y - x @ w.T).max() / np.abs(x @ w.T).max())
"""


@pytest.mark.parametrize("how", [dict(MALLOC_PERTURB_="165"), dict(NUMBA_CPU_NAME="generic")],
                         ids=["freed memory is overwritten", "no AVX2"])
def test_a_product_elsewhere(how, tmp_path):
    """Freed memory mostly still holds what it held: here it is overwritten at once, so that it shows if an array is
    freed while a thread reads it. And where numba compiles for a machine without AVX2 the products are right too."""
    tests = Path(__file__).parent
    path = os.pathsep.join((str(tests), str(tests.parent)))
    where = dict(os.environ, PYTHONPATH=path, **how)
    if "NUMBA_CPU_NAME" in how:
        where["NUMBA_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PRODUCT], env=where, capture_output=True, text=True)
    assert done.returncode == 0 and float(done.stdout) < 0.03, done.stderr


TWICE = """
import numpy as np
from test_kernels import ALONE, attention, kernels
how, size = attention(0, 3, 2, 2, 16, 150, 16, False)
out = np.empty((3, size), np.float32)
kernels.attend(*how, ALONE, out)
shares = kernels.shared(kernels.share_of_attention).cache_hits
print(out.tobytes().hex(), min(shares, sum(kernels.attend.stats.cache_hits.values())))
"""


def test_what_was_kept_on_disk_gives_the_bits_of_what_was_compiled(tmp_path):
    """Else the first run on a machine would write other texts than those behind it."""
    tests = Path(__file__).parent
    path = os.pathsep.join((str(tests), str(tests.parent)))
    where = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=path)
    first, again = (subprocess.run([sys.executable, "-c", TWICE], env=where, capture_output=True, text=True, check=True
                                   ).stdout.split() for _ in range(2))
    assert first[0] == again[0] and (first[1], again[1]) == ("0", "1")
