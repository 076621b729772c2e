"""Curvature against its oracles: autograd for the closed form, dense matrices for the products."""

import itertools
import math
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import GPT2Config, GPT2LMHeadModel

from hf_slt import SLTError, SupermaskGPT2Config, SupermaskGPT2LMHeadModel
from hf_slt.papers.attention_hessian import attention_hessian, to_score_space
from hf_slt.papers.curvature import BLOCKS, BlockCurvature, _PlainModel, block_curvature
from hf_slt.papers.curvature_report import (
    curvature_report,
    format_report,
    measure_saved,
    plot_report,
    report_records,
    value_to_query,
)
from hf_slt.training.monitoring import attention_moments

PAIRS = [("q", "q"), ("k", "k"), ("q", "k"), ("q", "v"), ("k", "v"), ("v", "v")]


# ---------------------------------------------------------------------------------------------------
# Closed form


def naive_attention(X, W_QK, W_VO, scale, softmax, causal):
    """Sum over heads of A X W_VO, written for autograd and for nothing else."""
    T = scale * X @ W_QK @ X.T
    hidden = torch.ones(T.shape[-2:], dtype=torch.bool).triu(1) if causal else None
    if softmax:
        A = (T.masked_fill(hidden, -math.inf) if causal else T).softmax(-1)
    else:
        A = T.masked_fill(hidden, 0.0) if causal else T
    return (A @ X @ W_VO).sum(0)


def autograd_parts(weights, predict, Y):
    """Outer and functional Hessian over all weights, flattened in order, by double differentiation."""
    sizes = [w.numel() for w in weights]

    def unpack(flat):
        return [part.view(w.shape) for part, w in zip(flat.split(sizes), weights, strict=True)]

    flat = torch.cat([w.reshape(-1) for w in weights])
    H = torch.autograd.functional.hessian(lambda p: (predict(*unpack(p)) - Y).pow(2).mean(), flat)
    J = torch.autograd.functional.jacobian(lambda p: predict(*unpack(p)).reshape(-1), flat)
    outer = 2.0 / Y.numel() * J.T @ J
    return outer, H - outer, sizes


def draw(seed, *shapes, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def assert_blocks_equal(ours, weights, names, predict, Y, tol=1e-12):
    outer, functional, sizes = autograd_parts(weights, predict, Y)
    edges = np.cumsum([0, *sizes])
    where = {name: slice(a, b) for name, a, b in zip(names, edges[:-1], edges[1:], strict=True)}
    assert set(ours.outer) == set(ours.functional) == set(itertools.product(names, names))
    for m, n in ours.outer:
        # relative to the whole part: a block that is zero in exact arithmetic has no scale of its own
        block = (where[m], where[n])
        for got, want in ((ours.outer[m, n], outer[block]), (ours.functional[m, n], functional[block])):
            scale = max(want.norm().item(), 1e-3 * (outer + functional)[block].norm().item())
            assert (got - want).norm().item() <= tol * scale, (m, n)
        assert (ours.total[m, n] - (outer + functional)[block]).norm() <= tol * (outer + functional)[
            block
        ].norm()


@pytest.mark.parametrize("parameterization", ["qk", "single"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax", [True, False])
def test_closed_form_is_the_autograd_hessian(softmax, causal, temperature, parameterization):
    L, d, d_K, d_out = 6, 4, 3, 5
    X, Y, W_Q, W_K, W_V = draw(1, (L, d), (L, d_out), (d, d_K), (d, d_K), (d, d_out))
    options = {"softmax": softmax, "causal": causal}
    scale = 1 / (temperature * math.sqrt(d_K))
    ours = attention_hessian(
        X, W_Q, W_K, W_V, Y, temperature=temperature, parameterization=parameterization, **options
    )
    if parameterization == "single":
        weights, names = [W_Q @ W_K.T, W_V], ["qk", "v"]

        def predict(qk, v):
            return naive_attention(X, qk[None], v[None], scale, **options)
    else:
        weights, names = [W_Q, W_K, W_V], ["q", "k", "v"]

        def predict(q, k, v):
            return naive_attention(X, (q @ k.T)[None], v[None], scale, **options)

    assert_blocks_equal(ours, weights, names, predict, Y)


@pytest.mark.parametrize("parameterization", ["qk", "single"])
@pytest.mark.parametrize("softmax", [True, False])
def test_heads_are_summed_through_the_output_projection(softmax, parameterization):
    heads, L, d, d_K, d_V, d_out = 2, 5, 4, 3, 2, 3
    shapes = [(L, d), (L, d_out), (heads, d, d_K), (heads, d, d_K), (heads, d, d_V), (heads, d_V, d_out)]
    X, Y, W_Q, W_K, W_V, W_O = draw(2, *shapes)
    ours = attention_hessian(
        X, W_Q, W_K, W_V, Y, W_O=W_O, softmax=softmax, causal=True, parameterization=parameterization
    )
    assert ours.M3.shape == (heads, L, d, d, d)
    scale = 1 / math.sqrt(d_K)
    if parameterization == "single":
        weights, names = [W_Q @ W_K.mT, W_V, W_O], ["qk", "v", "o"]

        def predict(qk, v, o):
            return naive_attention(X, qk, v @ o, scale, softmax, True)
    else:
        weights, names = [W_Q, W_K, W_V, W_O], ["q", "k", "v", "o"]

        def predict(q, k, v, o):
            return naive_attention(X, q @ k.mT, v @ o, scale, softmax, True)

    assert_blocks_equal(ours, weights, names, predict, Y)


def test_moments_are_central_moments_of_the_attended_rows():
    X, Y, W_Q, W_K, W_V = draw(3, (5, 3), (5, 3), (3, 2), (3, 2), (3, 3))
    ours = attention_hessian(X, W_Q, W_K, W_V, Y, causal=True)
    T = (X @ W_Q @ W_K.T @ X.T / math.sqrt(2)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    for i, weights in enumerate(T.softmax(-1).tolist()):
        mean = sum(a * x for a, x in zip(weights, X, strict=True))
        second = sum(a * torch.outer(x - mean, x - mean) for a, x in zip(weights, X, strict=True))
        third = sum(a * torch.einsum("r,s,t->rst", *[x - mean] * 3) for a, x in zip(weights, X, strict=True))
        for got, want in ((ours.M1, mean), (ours.M2, second), (ours.M3, third)):
            assert torch.allclose(got[i], want, rtol=1e-12, atol=1e-14)


def test_numpy_in_numpy_out():
    tensors = draw(4, (4, 3), (3, 2), (3, 2), (3, 3), (4, 3))
    ours = attention_hessian(*[t.numpy() for t in tensors])
    theirs = attention_hessian(*tensors)
    assert isinstance(ours.outer["q", "k"], np.ndarray)
    assert isinstance(ours.M2, np.ndarray)
    assert np.array_equal(ours.outer["q", "k"], theirs.outer["q", "k"].numpy())


def test_wrong_arguments_are_named():
    X, W_Q, W_K, W_V, Y = draw(5, (4, 3), (3, 2), (3, 2), (3, 3), (4, 3))
    with pytest.raises(ValueError, match="parameterization='both'"):
        attention_hessian(X, W_Q, W_K, W_V, Y, parameterization="both")
    with pytest.raises(ValueError, match="temperature=0"):
        attention_hessian(X, W_Q, W_K, W_V, Y, temperature=0)
    with pytest.raises(ValueError, match=r"W_V has shape \(1, 3, 2\)"):
        attention_hessian(X, W_Q, W_K, W_V[:, :2], Y)
    with pytest.raises(ValueError, match="4 and 4 entries"):
        to_score_space(torch.eye(3), torch.ones(4))


# ---------------------------------------------------------------------------------------------------
# Orders in the scale of the input


def slopes(sigmas, *, layer_norm=False, size=8, seeds=8, **options):
    """Log-log slope in sigma of each block's Frobenius norm, per part: {(part, pair): slope}."""
    logs = {}
    for seed in range(seeds):
        unit, Y, *weights = draw(seed, *[(size, size)] * 5)
        weights = [w / math.sqrt(size) for w in weights]
        for sigma in sigmas:
            X = sigma * unit
            if layer_norm:
                X = torch.nn.functional.layer_norm(X, (size,), eps=0.0)
            H = attention_hessian(X, *weights, Y, **options)
            for part in ("outer", "functional"):
                for pair in PAIRS:
                    logs.setdefault((part, pair), []).append(getattr(H, part)[pair].norm().item())
    fits = {}
    for key, norms in logs.items():
        norms = np.array(norms).reshape(seeds, len(sigmas))
        if norms.max() > 0:
            fits[key] = np.polyfit(np.log(sigmas), np.log(norms).mean(0), 1)[0]
    return fits


SMALL_SIGMA_ORDERS = {
    ("outer", ("q", "q")): 6,
    ("outer", ("k", "k")): 6,
    ("outer", ("q", "k")): 6,
    ("outer", ("q", "v")): 4,
    ("outer", ("k", "v")): 4,
    ("outer", ("v", "v")): 2,
    ("functional", ("q", "q")): 5,
    ("functional", ("k", "k")): 5,
    ("functional", ("q", "k")): 3,
    ("functional", ("q", "v")): 3,
    ("functional", ("k", "v")): 3,
}


def test_small_inputs_softmax_orders():
    fits = slopes(np.geomspace(0.01, 0.1, 5))
    assert set(fits) == set(SMALL_SIGMA_ORDERS)  # the value block has no functional part at all
    for key, order in SMALL_SIGMA_ORDERS.items():
        assert abs(fits[key] - order) < 0.05, (key, fits[key])


def test_linear_attention_orders_and_zero_functional_diagonal():
    for window in (np.geomspace(0.01, 0.1, 3), np.geomspace(1, 10, 3)):
        fits = slopes(window, softmax=False, seeds=4)
        for pair in PAIRS:
            assert abs(fits["outer", pair] - 6) < 0.02, (pair, fits["outer", pair])
    X, Y, *weights = draw(0, *[(8, 8)] * 5)
    H = attention_hessian(X, *weights, Y, softmax=False)
    for name in "qkv":
        assert H.functional[name, name].norm() <= 1e-12 * H.outer[name, name].norm()
        assert torch.linalg.eigvalsh(H.total[name, name]).min() > -1e-12 * H.outer[name, name].norm()


@pytest.mark.parametrize("softmax", [True, False])
def test_layer_norm_removes_every_slope(softmax):
    fits = slopes(np.geomspace(0.01, 10, 4), layer_norm=True, softmax=softmax, seeds=3)
    assert fits
    assert max(abs(slope) for slope in fits.values()) < 0.01


@pytest.mark.parametrize(
    ("part", "pair", "order"),
    [
        ("outer", ("q", "q"), -2),
        ("functional", ("q", "q"), -2),
        ("outer", ("q", "k"), -2),
        ("functional", ("q", "k"), -1),
        ("outer", ("q", "v"), -1),
        ("functional", ("q", "v"), -1),
        ("outer", ("v", "v"), 0),
    ],
)
def test_temperature_orders(part, pair, order):
    X, Y, *weights = draw(7, *[(8, 8)] * 5)
    weights = [w / math.sqrt(8) for w in weights]
    norms = [
        getattr(attention_hessian(X, *weights, Y, temperature=t), part)[pair].norm().item()
        for t in (64.0, 256.0)
    ]
    assert abs(math.log(norms[1] / norms[0], 4) - order) < 0.1


# ---------------------------------------------------------------------------------------------------
# Scores


def test_score_block_is_the_autograd_hessian_over_soft_scores():
    """With F at w * s and s real, d2/ds2 at s = m is what the straight-through identity promises."""
    X, Y, W_Q, W_K, W_V = draw(8, (6, 4), (6, 4), (4, 3), (4, 3), (4, 4))
    masks = [(w > 0).double() for w in draw(9, (4, 3), (4, 3), (4, 4))]
    frozen = [W_Q, W_K, W_V]
    flat_mask = torch.cat([m.reshape(-1) for m in masks])
    flat_weight = torch.cat([w.reshape(-1) for w in frozen])

    def loss(scores):
        q, k, v = (
            part.view(w.shape)
            for part, w in zip((flat_weight * scores).split([12, 12, 16]), frozen, strict=True)
        )
        return (naive_attention(X, (q @ k.T)[None], v[None], 1 / math.sqrt(3), True, False) - Y).pow(2).mean()

    want = torch.autograd.functional.hessian(loss, flat_mask)
    H = attention_hessian(X, *[w * m for w, m in zip(frozen, masks, strict=True)], Y)
    where = {"q": slice(0, 12), "k": slice(12, 24), "v": slice(24, 40)}
    weight = dict(zip("qkv", frozen, strict=True))
    for m, n in H.total:
        got = to_score_space(H.total[m, n], weight[m], weight[n])
        assert (got - want[where[m], where[n]]).norm() <= 1e-12 * want[where[m], where[n]].norm()


def test_signed_constant_weights_keep_the_spectrum():
    X, Y = draw(10, (6, 4), (6, 4))
    constant = 0.3
    frozen = [constant * w.sign() for w in draw(11, *[(4, 4)] * 3)]
    masks = [(w > 0).double() for w in draw(12, *[(4, 4)] * 3)]
    H = attention_hessian(X, *[w * m for w, m in zip(frozen, masks, strict=True)], Y)
    for name, weight in zip("qkv", frozen, strict=True):
        got = torch.linalg.eigvalsh(to_score_space(H.total[name, name], weight))
        want = constant**2 * torch.linalg.eigvalsh(H.total[name, name])
        assert (got - want).abs().max() <= 1e-12 * want.abs().max()


def test_scaling_query_and_key_multiplies_the_query_scores_curvature_by_n():
    n = 32
    X, Y, W_Q, W_K, W_V = draw(13, (8, 8), (8, 8), (8, n), (8, n), (8, 8))
    X, W_Q, W_K = 0.05 * X, W_Q / math.sqrt(8), W_K / math.sqrt(8)
    factor = n**0.25

    def score_norms(scale):
        H = attention_hessian(X, scale * W_Q, scale * W_K, W_V, Y)
        query = to_score_space(H.total["q", "q"], scale * W_Q).norm()
        return query.item(), H.total["v", "v"].norm().item()

    (query, value), (query_scaled, value_scaled) = score_norms(1.0), score_norms(factor)
    assert abs(query_scaled / query / n - 1) < 0.05
    assert abs(value_scaled / value - 1) < 0.01


# ---------------------------------------------------------------------------------------------------
# Blocks of a whole model

SHAPE = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 48,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def stock(**options):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, initializer_range=0.2, **options))
    return model.eval()


def supermask(**options):
    defaults = dict(SHAPE, initializer_range=0.2, density=0.5, seed=3)
    return SupermaskGPT2LMHeadModel(SupermaskGPT2Config(**{**defaults, **options})).eval()


def tokens(batch=2, length=8, seed=0, vocabulary=48):
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def dense(model, batches, layer, block, space="weight", **options):
    """H and H_o of one block as matrices, column by column from the operators, in double."""
    plain = _PlainModel(model, batches, dtype=torch.float64, **options)
    layers = None if layer is None else [layer]
    (place,) = plain.places([block], layers, space)
    operator = plain.operator(place, space)
    columns = torch.eye(operator.size, dtype=torch.float64).split(64, dim=1)
    H, H_o = (torch.cat(part, 1) for part in zip(*map(operator.with_outer, columns), strict=True))
    assert torch.equal(operator @ columns[-1], H[:, -columns[-1].shape[1] :])
    return H, H_o


@pytest.mark.parametrize(
    ("layer", "block", "columns"), [(0, "q", 0), (1, "k", 1), (0, "v", 2), (None, "embedding", 0)]
)
def test_operators_are_the_autograd_hessian_of_the_loss(layer, block, columns):
    model, ids = stock(attn_implementation="eager").double(), tokens(batch=1, length=6)
    name = "transformer.wte.weight" if layer is None else f"transformer.h.{layer}.attn.c_attn.weight"
    weight = model.get_parameter(name).detach()
    part = slice(16 * columns, 16 * columns + 16)

    def logits(moved):  # of every position that predicts
        moved = torch.cat([weight[:, : part.start], moved.view(-1, 16), weight[:, part.stop :]], 1)
        return torch.func.functional_call(model, {name: moved}, (ids,)).logits[0, :-1]

    def loss(moved):  # transformers' own would round the logits to float32
        return torch.nn.functional.cross_entropy(logits(moved), ids[0, 1:])

    at = weight[:, part].reshape(-1)
    H, H_o = dense(model, ids, layer, block)
    want = torch.autograd.functional.hessian(loss, at)
    assert (H - want).norm() <= 1e-12 * want.norm()
    J = torch.autograd.functional.jacobian(logits, at)  # token, class, weight
    p = logits(at).softmax(-1)
    of_loss = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    want = torch.einsum("tcw,tce,tev->wv", J, of_loss, J) / len(p)
    assert (H_o - want).norm() <= 1e-12 * want.norm()


def test_blocks_no_larger_than_the_probes_are_exact():
    model = supermask(n_layer=1, n_head=1, layer_norm=False, n_qk=4, n_v=4)
    rows = block_curvature(model, tokens(), ("q", "v"), probes=64, eigenvalues=False, dtype=torch.float64)
    assert [row.size for row in rows] == [16 * 4, 16 * 4]  # query, key and value have widths of their own
    H, H_o = dense(model, tokens(), 0, "q")
    assert rows[0].norm == pytest.approx(H.norm().item(), rel=1e-12)
    assert rows[0].norm_outer == pytest.approx(H_o.norm().item(), rel=1e-12)
    assert rows[0].norm_functional == pytest.approx((H - H_o).norm().item(), rel=1e-12)
    assert rows[0].trace == pytest.approx(H.trace().item(), rel=1e-9)
    whole = block_curvature(
        model, tokens(), ("q",), probes=64, parts=False, eigenvalues=False, dtype=torch.float64
    )
    assert whole[0].norm == pytest.approx(rows[0].norm, rel=1e-12)
    assert math.isnan(whole[0].norm_outer)


def test_twenty_probes_and_lanczos_against_dense():
    model, ids = supermask(), tokens(batch=4)
    for row in block_curvature(model, ids, ("q", "v", "fc", "embedding"), layers=[0], dtype=torch.float64):
        H, H_o = dense(model, ids, row.layer, row.block)
        for got, want in ((row.norm, H), (row.norm_outer, H_o), (row.norm_functional, H - H_o)):
            assert got == pytest.approx(want.norm().item(), rel=0.15), row
        eigenvalues = torch.linalg.eigvalsh(H)
        assert row.smallest == pytest.approx(eigenvalues[0].item(), rel=1e-4)
        assert row.largest == pytest.approx(eigenvalues[-1].item(), rel=1e-4)


def test_eigenvalues_of_a_block_that_hardly_bends_or_not_at_all():
    faint = supermask(layer_norm=False, initializer_range=0.02, n_layer=1)
    (row,) = block_curvature(faint, tokens(), ("q",), "score", dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(dense(faint, tokens(), 0, "q", space="score")[0])
    assert eigenvalues[-1] < 1e-12
    assert row.smallest == pytest.approx(eigenvalues[0].item(), rel=1e-4, abs=0)
    assert row.largest == pytest.approx(eigenvalues[-1].item(), rel=1e-4, abs=0)
    with torch.no_grad():
        flat = stock()
        flat.transformer.h[0].attn.c_proj.weight.zero_()  # nothing that attention does is read
    (row,) = block_curvature(flat, tokens(), ("q",), layers=[0])
    assert (row.norm, row.smallest, row.largest) == (0, 0, 0)


def test_score_space_is_the_weight_hessian_between_frozen_weights():
    model, ids = supermask(law="normal"), tokens()
    plan = model.transformer.h[1].attn.c_attn.parameter_plans["weight"]
    for block, part in zip("qkv", plan.tensors, strict=True):
        weight = torch.from_numpy(part.draw()).double()
        H, H_o = dense(model, ids, 1, block)
        S, S_o = dense(model, ids, 1, block, space="score")
        for got, want in ((S, to_score_space(H, weight)), (S_o, to_score_space(H_o, weight))):
            assert (got - want).norm() <= 1e-12 * want.norm()


def test_score_space_is_the_derivative_of_the_gradient_that_trains():
    """Gradients that the straight-through layer itself returns, a little apart, against the operator."""
    model, ids = supermask().double(), tokens()
    layer = model.transformer.h[0].attn.c_attn
    scores, value = layer.value_scores, layer.parameter_plans["weight"].tensors[2]
    signs = scores.detach().double().sign()
    (direction,) = draw(0, tuple(scores.shape))
    displacement = torch.from_numpy(value.draw()) * signs * direction
    start = layer.weight.shape[1] - value.shape[1]

    def gradient(step):
        def move(_, inputs, output):  # as if the masked weight were step * displacement further
            query_key, values = output[..., :start], output[..., start:]
            return torch.cat([query_key, values + inputs[0] @ (step * displacement)], -1)

        model.zero_grad()
        hook = layer.register_forward_hook(move)
        model(ids, labels=ids).loss.backward()
        hook.remove()
        return scores.grad.double()

    eps = 0.02
    numeric = (gradient(eps) - gradient(-eps)) / (2 * eps)
    S, _ = dense(model, ids, 0, "v", space="score")
    exact = signs * (S @ (signs * direction).reshape(-1)).view(scores.shape)
    assert (numeric - exact).norm() <= 1e-2 * exact.norm()


def test_signed_constant_blocks_have_the_weights_spectrum():
    model, ids = supermask(law="signed_constant"), tokens()
    query, _, value = model.transformer.h[0].attn.c_attn.parameter_plans["weight"].tensors
    for block, part in zip("qv", (query, value), strict=True):
        constant = abs(float(part.draw()[0, 0]))
        want = constant**2 * torch.linalg.eigvalsh(dense(model, ids, 0, block)[0])
        got = torch.linalg.eigvalsh(dense(model, ids, 0, block, space="score")[0])
        assert (got - want).abs().max() <= 1e-12 * want.abs().max()


def test_paper_scale_multiplies_query_score_curvature_by_the_key_width():
    shape = {"layer_norm": False, "n_layer": 1, "n_head": 1, "n_qk": 32, "n_v": 8, "initializer_range": 0.05}
    query, value = (
        [
            block_curvature(
                supermask(qk_scale=scale, **shape),
                tokens(),
                (block,),
                "score",
                8,
                eigenvalues=False,
                dtype=torch.float64,
            )[0].norm
            for scale in (1.0, "paper")
        ]
        for block in ("q", "v")
    )
    assert query[1] / query[0] == pytest.approx(32, rel=0.05)
    assert value[1] / value[0] == pytest.approx(1, rel=0.01)


def test_states_merged_model_and_removed_layer_norm_agree():
    model, ids = supermask(), tokens()
    options = {"probes": 6, "eigenvalues": False, "dtype": torch.float64}
    scores = block_curvature(model, ids, space="score", **options)
    assert [row.block for row in scores] == [*BLOCKS[:-1], *BLOCKS[:-1], "embedding"]
    ticket = model.to_ticket()
    assert block_curvature(ticket, ids, space="score", **options) == scores
    weights = block_curvature(ticket, ids, ("q", "embedding"), **options)
    for ours, theirs in zip(
        weights, block_curvature(ticket.merge_and_unload(), ids, ("q", "embedding"), **options), strict=True
    ):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-9)
    removed = block_curvature(model, ids, ("q", "fc"), layer_norm="remove", **options)
    assert removed == block_curvature(supermask(layer_norm=False), ids, ("q", "fc"), **options)
    scaled = block_curvature(model, ids, ("q",), "score", qk_factor=2 / 8**0.25, **options)
    for ours, theirs in zip(
        scaled, block_curvature(supermask(qk_scale=2.0), ids, ("q",), "score", **options), strict=True
    ):
        assert ours.norm == pytest.approx(
            theirs.norm, rel=1e-5
        )  # float32 weights scaled before or after rounding


@pytest.mark.parametrize(
    ("options", "has_scores"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, True),
        ({"embedding": "frozen"}, False),
        ({"embedding": "trained", "n_qk": 4, "n_v": 12}, False),
    ],
)
def test_the_measured_copy_computes_what_the_model_computes(options, has_scores):
    model, ids = supermask(**options, attn_implementation="eager"), tokens()
    for one in (model, model.to_ticket()):
        plain = _PlainModel(one, ids)
        one.set_attn_implementation("eager")
        assert torch.equal(plain.model(ids).logits, one(ids).logits)
        assert [place.block for place in plain.places(("embedding",), None, "score")] == [
            "embedding"
        ] * has_scores
        assert len(list(plain.places(BLOCKS, None, "weight"))) == 13


def test_the_measured_model_is_left_as_it_was():
    model = supermask().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    block_curvature(model, tokens(), ("q",), probes=2, eigenvalues=False, layer_norm="remove", qk_factor=3.0)
    attention_moments(model, tokens())
    assert model.training
    assert model.config._attn_implementation == attention
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.transformer.h[0].attn.c_attn._forward_hooks


def test_batches_are_one_mean_over_predicted_tokens():
    model = stock()
    short, long = tokens(1, 5, seed=1), tokens(3, 8, seed=2)
    padded = torch.cat([torch.nn.functional.pad(short, (0, 3)), long])
    mask = torch.ones_like(padded)
    mask[0, 5:] = 0
    options = {"blocks": ("v",), "layers": [1], "probes": 5, "eigenvalues": False, "dtype": torch.float64}
    (apart,) = block_curvature(model, [short, long], **options)
    (together,) = block_curvature(model, {"input_ids": padded, "attention_mask": mask}, **options)
    labels = padded.masked_fill(mask == 0, -100)
    (labelled,) = block_curvature(model, {"input_ids": padded, "labels": labels}, **options)
    assert apart.norm == pytest.approx(together.norm, rel=1e-9)
    assert apart.norm == pytest.approx(labelled.norm, rel=1e-9)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that live, as they come and go, and the most there were."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, storage._cdata)
        self.most = max(self.most, self.now)
        return result

    def forget(self, key):
        self.now -= self.sizes.pop(key)


@pytest.mark.parametrize("space", ["weight", "score"])
def test_memory_is_a_small_multiple_of_the_largest_block(space):
    """A table that is nearly all of the model; with 8 probes at once it held 57 tables."""
    model = supermask(n_embd=32, vocab_size=30_000, n_layer=1)
    table = 4 * model.config.vocab_size * 32
    with LiveBytes() as live:
        block_curvature(model, tokens(1, 4), ("embedding",), space, probes=8, eigenvalues=False)
    assert 2 * table < live.most < 15 * table


def test_curvature_errors_name_value_and_cure():
    model = stock()
    with pytest.raises(ValueError, match='GPT2LMHeadModel has none: use space="weight"'):
        block_curvature(model, tokens(), space="score")
    with pytest.raises(ValueError, match="space='bits'"):
        block_curvature(model, tokens(), space="bits")
    with pytest.raises(ValueError, match="block 'w' is not one of q, k"):
        block_curvature(model, tokens(), ("w",))
    with pytest.raises(ValueError, match=r"layer 5 of a model with layers 0\.\.1"):
        block_curvature(model, tokens(), layers=[5])
    with pytest.raises(ValueError, match="no batches"):
        block_curvature(model, [])
    with pytest.raises(ValueError, match="predict no token"):
        block_curvature(model, tokens(length=1))
    with pytest.raises(ValueError, match="layer_norm='off'"):
        block_curvature(model, tokens(), layer_norm="off")


def test_without_scipy_the_extra_is_named_and_all_but_eigenvalues_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    missing = r"eigenvalues: the package scipy is not installed; pip install .*\[curvature\]"
    with pytest.raises(SLTError, match=missing):
        block_curvature(stock(), tokens(), ("q",), layers=[0], probes=1)
    with pytest.raises(SLTError, match=missing):  # before the model, which is not there, is looked for
        measure_saved("no model", eigenvalues=True)
    (row,) = block_curvature(stock(), tokens(), ("q",), layers=[0], probes=1, eigenvalues=False)
    assert row.norm > 0


# ---------------------------------------------------------------------------------------------------
# Moments, reports


@pytest.mark.parametrize("padded", [False, True])
def test_attention_moments_against_recorded_attention(padded):
    model, ids = stock(attn_implementation="eager"), tokens(3, 7)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 4:] = 0
    got = attention_moments(model, {"input_ids": ids, "attention_mask": mask})
    out = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    for layer, (A, hidden) in enumerate(zip(out.attentions, out.hidden_states[:-1], strict=True)):
        X = model.transformer.h[layer].ln_1(hidden).detach()
        mean = torch.einsum("bhij,bjr->bhir", A, X)
        centred = X[:, None, None] - mean[:, :, :, None]
        trace = (A[..., None] * centred.square()).sum((-1, -2))  # batch, heads, i
        want = (trace * mask[:, None]).sum((0, 2)) / mask.sum()
        assert torch.allclose(got[layer], want.detach(), rtol=1e-4)


def test_a_head_without_spread_gets_no_query_gradient():
    moments, gradients = [], []
    for scale in (1.0, 1e4):
        model = supermask(qk_scale=scale, n_layer=1)
        model(tokens(), labels=tokens()).loss.backward()
        moments.append(attention_moments(model, tokens(), relative=True).max().item())
        gradients.append(model.transformer.h[0].attn.c_attn.query_scores.grad.norm().item() / scale**2)
    assert 0.5 < moments[0] < 1.2
    assert moments[1] < 1e-3
    assert gradients[1] < 1e-3 * gradients[0]


def test_reports_as_text_records_and_figure(tmp_path):
    report = curvature_report(
        supermask(), tokens(), probes=4, eigenvalues=False, blocks=("q", "v"), space="score"
    )
    assert list(report) == ["LayerNorm", "no LayerNorm"]
    text = format_report(report)
    assert "v/q" in text
    assert text.count("\n") == 8
    assert f"{value_to_query(report['LayerNorm'])[1]:7.1e}" in text
    assert len(report_records(report)) == 8
    assert report_records(report)[0]["setting"] == "LayerNorm"
    plot_report(report, tmp_path / "curvature.png")
    assert (tmp_path / "curvature.png").read_bytes().startswith(b"\x89PNG")
    assert list(
        curvature_report(supermask(layer_norm=False), tokens(), probes=1, eigenvalues=False, blocks=("q",))
    ) == ["no LayerNorm"]


def test_value_to_query_of_no_query_curvature_is_infinite():
    rows = [
        BlockCurvature(0, block, "weight", 1, norm, norm, 0.0, 0.0, 0.0)
        for block, norm in (("q", 0.0), ("v", 1.0))
    ]
    assert value_to_query(rows) == {0: math.inf}
