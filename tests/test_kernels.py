"""What engine int8 does between its products, against the same in torch, and that a row has the same bits in any
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

import kernels


f32 = np.float32
sizes = st.integers(1, 70)
seeds = st.integers(0, 10**6)
few = settings(max_examples=40, deadline=None)
ALONE, TWO = kernels.team(1), kernels.team(2)  # threads


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


def rows(out, scale):
    """What a product is given, multiplied back."""
    assert np.abs(out).max() <= 1 + 1e-6
    return torch.from_numpy(out * scale[:, None])


def near(a, b, tolerance=2e-6):
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-20))


def test_exp():
    for x in np.concatenate((np.linspace(-87, 88, 4001, dtype=f32), numbers(0, 500))):
        apart = abs(kernels.exp(x) / np.exp(np.float64(x)) - 1)
        assert apart < 3e-7 + 1e-7 * abs(x)  # of which the second part is the rounding of x / ln 2
    assert kernels.exp(f32(-1e30)) < 1e-37 and kernels.exp(f32(1e30)) > 1e38 and kernels.exp(f32(0)) == 1


@few
@given(seeds, st.integers(1, 4), sizes, st.booleans())
def test_norm(seed, n, d, centred):
    x, weight, bias, shrink = numbers(seed, n, d) * 3, numbers(seed + 1, d), numbers(seed + 2, d), numbers(seed + 3, d)
    bias *= centred
    out, scale = np.empty((n, d), f32), np.empty(n, f32)
    kernels.norm(x, weight, bias, f32(1e-5), centred, shrink, out, scale)
    x, weight, bias, shrink = map(torch.from_numpy, (x, weight, bias, shrink))
    theirs = F.layer_norm(x.double(), (d,), weight.double(), bias.double()) if centred else F.rms_norm(
        x.double(), (d,), weight.double(), eps=1e-5)
    assert near(rows(out, scale), theirs * shrink, 1e-5)


@few
@given(seeds, st.integers(1, 4), sizes)
def test_gate(seed, n, d):
    y, scale, bias, shrink = numbers(seed, n, 2 * d) * 4, np.abs(numbers(seed + 1, n)), numbers(seed, 2 * d), numbers(
        seed + 2, d)
    out, out_scale = np.empty((n, d), f32), np.empty(n, f32)
    kernels.gate(y, scale, bias, ALONE, shrink, out, out_scale)
    gate, up = (torch.from_numpy(y * scale[:, None] + bias)).double().chunk(2, -1)
    assert near(rows(out, out_scale), F.silu(gate) * up * torch.from_numpy(shrink))


def test_gate_of_extremes():
    y, out, scale = np.array([[-1e4, -90, 90, 1e4, 1, 1, 1, 1]], f32), np.empty((1, 4), f32), np.empty(1, f32)
    kernels.gate(y, np.ones(1, f32), np.zeros(8, f32), ALONE, np.ones(4, f32), out, scale)
    assert (out * scale)[0].tolist() == pytest.approx([0, 0, 90, 1e4], rel=1e-6, abs=1e-30)


def attention(seed, n, kv_heads, group, size, start, turned, interleaved, among=None):
    """The arguments of kernels.attend, but for the last three; what its three parts are; and its output's size."""
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
    return [y, np.abs(numbers(seed + 3, n)), numbers(seed + 4, y.shape[1]), np.array(where), np.cos(angles),
            np.sin(angles), columns, start, among], heads * size


def in_torch(y, scale, bias, where, cos, sin, columns, start, among):
    """The same in float64: [n, heads * size], and the columns afterwards."""
    y, columns = torch.from_numpy(y * scale[:, None] + bias).double(), torch.from_numpy(columns).double()
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
    mask = F.pad(torch.from_numpy(among).double(), (start, 0))
    keys, values = columns[:, :, : start + n].repeat_interleave(heads // kv_heads, dim=1)
    out = F.scaled_dot_product_attention(part[0], keys, values, mask)
    return out.transpose(0, 1).reshape(n, -1), columns


@few
@given(seeds, st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 16, 20, 64]),
       st.integers(0, 90), st.booleans(), st.booleans(), st.sampled_from([1, 2, 3]))
def test_attend(seed, n, kv_heads, group, size, start, all_turned, interleaved, threads):
    how = attention(seed, n, kv_heads, 1 if interleaved else group, size, start, size if all_turned else size // 4 * 2,
                    interleaved)[0]
    expected, columns = in_torch(*how)
    out, scale = np.empty(expected.shape, f32), np.empty(n, f32)
    shrink = numbers(seed + 5, out.shape[1])
    kernels.attend(*how, kernels.team(threads), shrink, out, scale)
    assert near(rows(out, scale), expected * torch.from_numpy(shrink), 1e-5)
    assert near(torch.from_numpy(how[6]), columns, 1e-6)


@few
@given(seeds, st.integers(2, 9), st.integers(0, 70))
def test_a_node_has_the_bits_of_its_own_branch(seed, m, start):
    """A tree in one pass, and each path of it as a chain, token by token: columns, attention, all in the same bits."""
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(-1, i)) if i else -1 for i in range(m)]
    among, paths = np.full((m, m), -np.inf, f32), []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
        among[i, paths[-1]] = 0
    how, size = attention(seed, m, 2, 2, 16, start, 16, False, among)
    out, scale, shrink = np.empty((m, size), f32), np.empty(m, f32), numbers(seed + 6, size)
    alone = [array.copy() if isinstance(array, np.ndarray) else array for array in how]
    kernels.attend(*how, TWO, shrink, out, scale)
    for node, path in enumerate(paths):
        columns = alone[6].copy()
        for depth, i in enumerate(path):
            one, one_scale = np.empty((1, size), f32), np.empty(1, f32)
            row = slice(i, i + 1)
            kernels.attend(alone[0][row].copy(), alone[1][row], *alone[2:4], alone[4][row], alone[5][row], columns,
                           start + depth, np.zeros((1, 1), f32), ALONE, shrink, one, one_scale)
        assert np.array_equal(one[0], out[node]) and one_scale[0] == scale[node]


@few
@given(seeds, st.integers(2, 20), sizes)
def test_a_row_has_the_same_bits_in_any_company(seed, n, d):
    x, y, scale = numbers(seed, n, d), numbers(seed + 1, n, d), np.abs(numbers(seed + 2, n))
    bias, weight, shrink = numbers(seed + 3, d), numbers(seed + 4, d), numbers(seed + 5, d)
    both = numbers(seed + 6, n, 2 * d)
    for kernel, of_rows, for_all in ((kernels.norm, [x], [weight, bias, f32(1e-5), True]), (kernels.levelled, [x], []),
                                     (kernels.gate, [both, scale], [np.concatenate((bias, bias)), TWO])):
        out, out_scale = np.empty((n, d), f32), np.empty(n, f32)
        kernel(*of_rows, *for_all, shrink, out, out_scale)
        for i in range(n):
            one, one_scale = np.empty((1, d), f32), np.empty(1, f32)
            kernel(*(array[i : i + 1] for array in of_rows), *for_all, shrink, one, one_scale)
            assert np.array_equal(one[0], out[i]) and one_scale[0] == out_scale[i]
    together = x.copy()
    kernels.add(together, y, scale, bias)
    assert np.allclose(together, x + y * scale[:, None] + bias, atol=1e-5)
    for i in range(n):
        one = x[i : i + 1].copy()
        kernels.add(one, y[i : i + 1], scale[i : i + 1], bias)
        assert np.array_equal(one[0], together[i])


@few
@given(seeds, st.integers(2, 30), st.integers(1, 3), st.integers(1, 4), st.integers(60, 300))
def test_threads_change_no_bit(seed, n, kv_heads, group, start):
    """Of many passes one after another, as a race would show now and then."""
    how, size = attention(seed, n, kv_heads, group, 16, start, 16, False)
    both, bias, shrink = numbers(seed, n, 2 * size), numbers(seed + 1, 2 * size), numbers(seed + 2, size)
    results = []
    for team in (ALONE, TWO, TWO, kernels.team(5), TWO):
        mine = [array.copy() if isinstance(array, np.ndarray) else array for array in how]
        outs, scales = np.empty((2, n, size), f32), np.empty((2, n), f32)
        kernels.attend(*mine, team, shrink, outs[0], scales[0])
        kernels.gate(both, how[1], bias, team, shrink, outs[1], scales[1])
        results.append((outs.tobytes(), scales.tobytes(), mine[6].tobytes()))
    assert len(set(results)) == 1


def test_without_openmp_there_is_one_thread(monkeypatch):
    def none(name):
        raise OSError

    monkeypatch.setattr(kernels.ctypes, "CDLL", none)
    team = kernels.team.__wrapped__(4)
    assert team[kernels.THREADS] == 1
    how, size = attention(0, 20, 2, 3, 16, 90, 16, False)
    out, scale = np.empty((2, 20, size), f32), np.empty((2, 20), f32)
    for i, mine in enumerate((team, TWO)):
        again = [x.copy() if isinstance(x, np.ndarray) else x for x in how]
        kernels.attend(*again, mine, np.ones(size, f32), out[i], scale[i])
    assert np.array_equal(out[0], out[1]) and np.array_equal(scale[0], scale[1])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_rounded_away(odd):
    """As a whole number of 8 bits it would be one: the row's scale tells of it, and no other row's."""
    x, out, scale = numbers(0, 3, 40), np.empty((3, 40), f32), np.empty(3, f32)
    x[1, 17] = odd
    kernels.levelled(x, np.ones(40, f32), out, scale)
    assert np.isnan(scale[1]) and np.isfinite(scale[[0, 2]]).all() and np.isfinite(out[[0, 2]]).all()


def test_a_row_of_zeros_is_levelled():
    out, scale = np.empty((1, 8), f32), np.empty(1, f32)
    kernels.levelled(np.zeros((1, 8), f32), np.ones(8, f32), out, scale)
    assert not out.any() and 0 < scale[0] < 1e-20


def test_nan_and_infinity_go_through_the_gate():
    y, one = np.ones((3, 8), f32), np.ones(3, f32)
    y[0, 1], y[1, 6], y[2, 2] = np.nan, np.nan, np.inf
    assert np.isnan(kernels.exp(f32(np.nan)))
    out, scale = np.empty((3, 4), f32), np.empty(3, f32)
    kernels.gate(y, one, np.zeros(8, f32), ALONE, np.ones(4, f32), out, scale)
    assert not np.isfinite(scale).any()


def test_a_nan_is_seen_by_those_who_look_at_it():
    """Not by earlier tokens, nor by another branch: the nodes 0 and 1 are children of the text, 2 is one of 0."""
    among = np.full((3, 3), -np.inf, f32)
    among[[0, 1, 2, 2], [0, 1, 0, 2]] = 0
    how, size = attention(0, 3, 2, 2, 16, 9, 16, False, among)
    how[1][0] = np.nan
    out, scale = np.empty((3, size), f32), np.empty(3, f32)
    kernels.attend(*how, ALONE, np.ones(size, f32), out, scale)
    assert np.isnan(scale).tolist() == [True, False, True] and np.isfinite(out[1]).all()


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(tmp_path):
    """As for a project in a folder that is read-only, whose user has no folder of his own."""
    (tmp_path / "kernels.py").write_text(Path(kernels.__file__).read_text())
    (tmp_path / "__pycache__").write_text("no folder")
    nowhere = dict(os.environ, HOME=str(tmp_path / "kernels.py"), XDG_CACHE_HOME=str(tmp_path / "kernels.py"))
    nowhere.pop("NUMBA_CACHE_DIR", None)
    code = "import kernels; print(kernels.exp(kernels.f32(0)), type(kernels.exp._cache).__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=nowhere, capture_output=True, text=True)
    assert done.stdout.split() == ["1.0", "NullCache"], done.stderr


TWICE = """
import numpy as np
from test_kernels import ALONE, attention, kernels
how, size = attention(0, 3, 2, 2, 16, 150, 16, False)
out, scale = np.empty((3, size), np.float32), np.empty(3, np.float32)
kernels.attend(*how, ALONE, np.ones(size, np.float32), out, scale)
shares = kernels.shared(kernels.share_of_attend).cache_hits
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
