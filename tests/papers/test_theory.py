"""The theory against its oracles: brute force and a MILP solver for subset sums, dense products for
masks, plain float64 attention for the library's own layers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_slt
from hf_slt.papers import theory
from hf_slt.papers.subset_sum import best_subset, prune_relu_to_match, prune_to_match
from hf_slt.weights.random_weights import draw

CONSTRUCTIONS = ("proof", "balanced")


def products(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(-1, 1, shape) * rng.uniform(-1, 1, shape)


def within_norm(rng: np.random.Generator, *shape: int) -> np.ndarray:
    W = rng.normal(size=shape)
    return W / np.linalg.norm(W, 2, axis=(-2, -1), keepdims=True)


# ---------------------------------------------------------------------------------------------------
# Subset sums


@pytest.mark.parametrize("n", [1, 2, 7, 10, 11, 12, 15])
def test_nearest_of_all_subsets(n):
    rng = np.random.default_rng(n)
    values, target = products(rng, 12, n), rng.uniform(-1.5, 1.5, 12)
    subsets = (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(float)  # every subset, as rows
    nearest = np.abs(values @ subsets.T - target[:, None]).min(axis=1)
    found = best_subset(values, target)
    np.testing.assert_allclose(found.error, nearest, atol=1e-14)
    np.testing.assert_allclose(np.abs((values * found.mask).sum(1) - target), found.error, atol=1e-14)
    assert (found.slack == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=13),  # small integers: ties, zeros, repeats
    st.integers(-70, 70),
)
def test_nearest_with_ties(values, target):
    sums = {0}
    for v in values:
        sums |= {s + v for s in sums}
    assert best_subset(np.array(values), target).error == min(abs(s - target) for s in sums)


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_milp(seed):
    rng = np.random.default_rng(seed)
    n = 18
    values, target = products(rng, n), rng.uniform(-1, 1)
    found = best_subset(values, target)
    # minimise e over binary m with -e <= values @ m - target <= e
    rows = np.stack([np.append(values, -1.0), np.append(values, 1.0)])
    solved = milp(
        np.append(np.zeros(n), 1.0),
        constraints=LinearConstraint(rows, [-np.inf, target], [target, np.inf]),
        integrality=np.append(np.ones(n), 0),
        bounds=Bounds(0, np.append(np.ones(n), np.inf)),
        options={"mip_rel_gap": 0},
    )
    theirs = abs(values @ np.round(solved.x[:n]) - target)
    assert found.error <= theirs + 1e-12
    # HiGHS may stop within its feasibility tolerance of 1e-6 of the optimum
    assert theirs <= found.error + 3e-6


def test_exact_at_forty_values():
    """A planted subset of 40 values is found again, or one as near."""
    rng = np.random.default_rng(0)
    values = products(rng, 40)
    planted = rng.random(40) < 0.5
    assert best_subset(values, math.fsum(values[planted])).error < 1e-13


@pytest.mark.parametrize("n", [50, 112, 300])
def test_many_values_are_near_exact_and_say_so(n):
    rng = np.random.default_rng(n)
    values, target = products(rng, 20, n), rng.uniform(-1, 1, 20)
    found = best_subset(values, target, core=24)
    assert found.error.max() < 1e-6
    np.testing.assert_allclose(found.error, np.abs((values * found.mask).sum(1) - target), atol=1e-12)
    assert (found.slack <= found.error).all()


def test_slack_bounds_the_distance_to_the_optimum():
    rng = np.random.default_rng(1)
    values, target = products(rng, 30, 14), rng.uniform(-2, 2, 30)
    rough, exact = best_subset(values, target, core=6), best_subset(values, target)
    assert (rough.error - rough.slack <= exact.error + 1e-14).all()
    assert (rough.error >= exact.error - 1e-14).all()


def test_out_of_reach_is_exact_beyond_the_core():
    rng = np.random.default_rng(2)
    values = products(rng, 60)
    found = best_subset(values, 100.0, core=10)
    assert (found.mask == (values > 0)).all()
    assert found.slack < 1e-12


def test_batch_equals_one_by_one():
    rng = np.random.default_rng(3)
    values, target = products(rng, 3, 4, 21), rng.uniform(-1, 1, (3, 4))
    batch = best_subset(values, target)
    for i in np.ndindex(3, 4):
        assert best_subset(values[i], target[i]).error == batch.error[i]


@pytest.mark.parametrize(
    ("values", "target", "core", "says"),
    [(3.0, 1.0, 40, "scalar"), ([1.0], np.nan, 40, "finite"), ([1.0], 1.0, 0, "core=0")],
)
def test_bad_problems_are_named(values, target, core, says):
    with pytest.raises(ValueError, match=says):
        best_subset(values, target, core=core)


# ---------------------------------------------------------------------------------------------------
# Matrices


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize(("d1", "d2"), [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (2, 5)])
def test_pruned_product_is_the_target(d1, d2, construction):
    rng = np.random.default_rng(10 * d1 + d2)
    n = 40 * d1
    W, W1, W2 = within_norm(rng, d1, d2), rng.uniform(-1, 1, (d1, n)), rng.uniform(-1, 1, (n, d2))
    found = prune_to_match(W, W1, W2, construction=construction, core=24)
    product = (W1 * found.mask1) @ (W2 * found.mask2)
    np.testing.assert_allclose(product, W, atol=2e-6)
    np.testing.assert_allclose(product - W, found.error, atol=1e-14)


def test_proof_construction_is_block_diagonal():
    rng = np.random.default_rng(4)
    W = within_norm(rng, 3, 2)
    found = prune_to_match(W, rng.uniform(-1, 1, (3, 31)), rng.uniform(-1, 1, (31, 2)))
    expected = np.zeros((3, 31), dtype=bool)
    for i in range(3):
        expected[i, 10 * i : 10 * (i + 1)] = True
    assert (found.mask1 == expected).all()


@pytest.mark.parametrize(("d1", "d2", "n"), [(2, 1, 24), (2, 2, 32), (4, 4, 40)])
def test_balanced_reaches_further(d1, d2, n):
    errors = {c: [] for c in CONSTRUCTIONS}
    for seed in range(40):
        rng = np.random.default_rng(seed)
        W, W1, W2 = within_norm(rng, d1, d2), rng.uniform(-1, 1, (d1, n)), rng.uniform(-1, 1, (n, d2))
        for c in CONSTRUCTIONS:
            errors[c].append(np.abs(prune_to_match(W, W1, W2, construction=c, core=20).error).max())
    assert np.mean(errors["balanced"]) < np.mean(errors["proof"]) / 4


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_relu_layer_is_the_target(construction):
    rng = np.random.default_rng(5)
    d1, d2, n = 3, 2, 300
    positive, negative = within_norm(rng, d1, d2), within_norm(rng, d1, d2)
    W1, W2 = rng.uniform(-1, 1, (d1, n)), rng.uniform(-1, 1, (n, d2))
    found = prune_relu_to_match(positive, negative, W1, W2, construction=construction, core=24)
    x = rng.normal(size=(50, d1))
    y = np.maximum(x @ (W1 * found.mask1), 0) @ (W2 * found.mask2)
    np.testing.assert_allclose(y, np.maximum(x, 0) @ positive + np.maximum(-x, 0) @ negative, atol=1e-5)
    assert np.abs(found.error).max() < 1e-6


def test_matrices_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="do not fit"):
        prune_to_match(np.eye(2), np.ones((2, 5)), np.ones((4, 2)))
    with pytest.raises(ValueError, match="'proof' or 'balanced'"):
        prune_to_match(np.eye(2), np.ones((2, 5)), np.ones((5, 2)), construction="better")


# ---------------------------------------------------------------------------------------------------
# Bounds


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 4096),
    d1=st.integers(1, 16),
    error=st.floats(0, 0.5),
    spread=st.floats(0, 30),
    adversarial=st.booleans(),
)
def test_softmax_bound_holds(seed, length, d1, error, spread, adversarial):
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.1, 10)
    X = rng.normal(size=(length, d1))
    X *= alpha / np.linalg.norm(X, axis=1, keepdims=True)
    allowed = rng.random(length) < rng.uniform(0.05, 1)
    allowed[rng.integers(length)] = True  # a row that sees nothing has no softmax
    logits = np.where(allowed, spread * rng.normal(size=length), -np.inf)
    # the worst push sorts the tokens along a direction and shifts the two sides apart
    side = np.sign(X @ rng.normal(size=d1)) if adversarial else rng.uniform(-1, 1, length)

    def average(z):
        p = np.exp(z - z.max())
        return p / p.sum() @ X

    moved = np.linalg.norm(average(logits + error * side) - average(logits))
    tight = theory.tight_softmax_bound(error, alpha)
    assert moved <= tight + 1e-12
    assert tight <= theory.softmax_bound(error, alpha, d1) + 1e-12


def test_tight_softmax_bound_is_attained():
    alpha, error = 3.0, 0.4
    p = 1 / (1 + math.exp(-error))  # two opposite tokens, logits moved from (-e/2, e/2) to (e/2, -e/2)
    assert theory.tight_softmax_bound(error, alpha) == pytest.approx(alpha * abs((2 * p - 1) * 2), rel=1e-12)


def test_softmax_bound_refuses_large_errors():
    with pytest.raises(ValueError, match=r"logit_error=0\.6"):
        theory.softmax_bound(0.6, 1.0, 2)


def test_required_width_inverts_to_the_constant():
    """Errors made to follow the theorem with C = 2 give C = 2 back, and the width that was used."""
    d1, d2, heads, alpha, C = 4, 2, 3, 5.0, 2.0
    widths = [80, 120, 160]
    eps = [8 * heads * alpha**3 * d1**1.5 * math.exp(-n / (C * d1)) for n in widths]
    errors = np.array([[e] * 50 for e in eps])
    assert theory.estimate_constant(widths, errors, d1, d2, heads, alpha) == pytest.approx(C)
    n_qk, n_v = theory.required_width(eps[1], d1, d2, heads, alpha, constant=C)
    assert n_qk in (120, 121)  # ceil of 120 up to rounding
    assert n_v < n_qk
    assert theory.required_width(eps[1] / 10, d1, d2, heads, alpha, constant=C)[0] > n_qk


def test_required_width_names_what_is_wrong():
    with pytest.raises(ValueError, match="eps=2"):
        theory.required_width(2, 2, 2, constant=1.0)
    with pytest.raises(ValueError, match="alpha=1"):
        theory.required_width(0.1, 4, 4, alpha=1.0, constant=1.0)


def test_required_width_suffices():
    """At the width that the theorem asks for, no more than a fraction eps of the sources fails."""
    eps, sources = 0.2, 20
    n_qk, n_v = theory.required_width(eps, 2, 1)
    rng = np.random.default_rng(6)
    target = random_attention(rng, 1, 2, 1)
    x = circle(rng, 8, 6)
    failures = 0
    for seed in range(sources):
        found = theory.approximate_attention(target, n_qk, n_v, seed, core=20)
        failures += np.linalg.norm(found(x) - target(x), axis=-1).max() > eps
    assert failures <= eps * sources


# ---------------------------------------------------------------------------------------------------
# Attention


def random_attention(rng, heads: int, d1: int, d2: int, width: int = 3) -> theory.TargetAttention:
    shapes = (heads, d1, width), (heads, d1, width), (heads, d1, width + 1), (heads, width + 1, d2)
    return theory.TargetAttention(*(within_norm(rng, *shape) for shape in shapes))


def circle(rng, batch: int, length: int, d: int = 2) -> np.ndarray:
    x = rng.normal(size=(batch, length, d))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_target_attention_is_torch_attention():
    rng = np.random.default_rng(7)
    target = random_attention(rng, 2, 3, 4)
    x = rng.normal(size=(2, 5, 3))
    allowed = (rng.random((2, 5, 5)) < 0.5) | np.eye(5, dtype=bool)
    t = {name: torch.from_numpy(getattr(target, name)) for name in ("query", "key", "value", "output")}
    inputs, want = torch.from_numpy(x), 0
    for h in range(2):
        q, k, v = (inputs @ t[name][h] for name in ("query", "key", "value"))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.from_numpy(allowed))
        want = want + mixed @ t["output"][h]
    np.testing.assert_allclose(target(x, allowed), want.numpy(), atol=1e-12)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize(("heads", "d1", "d2"), [(1, 2, 1), (2, 3, 3), (3, 2, 4)])
def test_pruned_attention_is_the_target(heads, d1, d2, construction):
    """The library's own layer, under any attention mask, within the bound that holds for all of them."""
    rng = np.random.default_rng(heads)
    target = random_attention(rng, heads, d1, d2)
    x = circle(rng, 4, 7, d1)
    some = (rng.random((4, 7, 7)) < 0.5) | np.eye(7, dtype=bool)
    for n, enough in ((8 * d1, np.inf), (40 * d1, 1e-5)):
        found = theory.approximate_attention(target, n, n + 1, seed=3, construction=construction, core=22)
        for allowed in (None, np.tri(7, dtype=bool), some):
            off = np.linalg.norm(found(x, allowed) - target(x, allowed), axis=-1).max()
            assert off <= found.bound(alpha=1.0) + 1e-12
            assert off < enough


def test_pruned_weights_multiply_to_the_target():
    """From the masks and the drawn weights alone, head by head: W_Q W_K^T / sqrt(n) and W_V W_O."""
    rng = np.random.default_rng(8)
    heads, d1, n_qk, n_v = 2, 3, 60, 75
    target = random_attention(rng, heads, d1, d1)
    found = theory.approximate_attention(target, n_qk, n_v, seed=11, core=22)
    kept = {
        name.removeprefix("h.0.attn.").removeprefix("c_attn."): mask
        * draw(11, name, mask.shape, "uniform", n_qk**0.25 if "query" in name or "key" in name else 1.0)
        for name, mask in found.masks.items()
        if ".attn." in name
    }
    for h in range(heads):
        qk, v = slice(h * n_qk, (h + 1) * n_qk), slice(h * n_v, (h + 1) * n_v)
        logits = kept["query"][:, qk] @ kept["key"][:, qk].T / math.sqrt(n_qk)
        np.testing.assert_allclose(logits, target.qk[h] + found.qk_error[h], atol=1e-5)
        np.testing.assert_allclose(kept["value"][:, v] @ kept["c_proj"][v], target.vo[h], atol=1e-4)


def test_heads_add_up():
    """Two heads of one source are, each alone, the heads of the target."""
    rng = np.random.default_rng(9)
    target = random_attention(rng, 2, 2, 2)
    found = theory.approximate_attention(target, 60, 60, seed=1, core=22)
    x = circle(rng, 3, 5)
    total = 0
    for h in (0, 1):
        masks = {name: mask.copy() for name, mask in found.masks.items()}
        masks["h.0.attn.c_proj"][(1 - h) * 60 : (2 - h) * 60] = False  # silence the other head
        layer = hf_slt.SupermaskGPT2Model.from_mask_arrays(found.config, masks).double().h[0].attn
        one = theory.run_attention(layer, x, 2)
        alone = theory.TargetAttention(
            *(getattr(target, name)[h : h + 1] for name in ("query", "key", "value", "output"))
        )
        np.testing.assert_allclose(one, alone(x), atol=1e-5)
        total = total + one
    np.testing.assert_allclose(total, found(x), atol=1e-12)


def test_error_does_not_grow_with_length():
    rng = np.random.default_rng(10)
    target = random_attention(rng, 1, 2, 1)
    found = theory.approximate_attention(target, 20, 20, seed=0)
    layer, bound = found.layer(), found.bound(alpha=1.0)
    errors = {}
    for length in (8, 64, 512, 2048):
        x = circle(rng, 2, length)
        errors[length] = np.abs(theory.run_attention(layer, x, 1) - target(x)).max()
        assert errors[length] <= bound
    assert errors[2048] < 2 * errors[8]


def test_scale_of_queries_and_keys_is_what_reaches():
    """With U[-1, 1] the logits' 1 / sqrt(n) shrinks every product, and W_QK is out of reach."""
    eye = np.eye(2)[None]
    target = theory.TargetAttention(2**0.5 * eye, eye, eye, eye)  # W_QK = identity
    paper, plain = (
        [
            np.abs(theory.approximate_attention(target, 48, 48, s, qk_scale=q, core=20).qk_error).max()
            for s in range(10)
        ]
        for q in ("paper", 1.0)
    )
    assert np.median(paper) < 1e-4
    assert min(plain) > 0.1


def test_attention_that_cannot_be_is_named():
    rng = np.random.default_rng(12)
    target = random_attention(rng, 1, 4, 2)
    with pytest.raises(ValueError, match="n_qk=3"):
        theory.approximate_attention(target, 3, 8, seed=0)
    with pytest.raises(ValueError, match="do not fit"):
        theory.TargetAttention(target.query, target.key[:, :2], target.value, target.output)


# ---------------------------------------------------------------------------------------------------
# Transformers


def small_gpt2(seed: int = 0, n_layer: int = 2, n_head: int = 2) -> GPT2LMHeadModel:
    """A stock GPT-2 without LayerNorm, its matrices within the norm bound."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=13, n_positions=10, n_embd=4, n_inner=6, n_layer=n_layer, n_head=n_head,
        activation_function="relu", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    model.transformer.ln_f = torch.nn.Identity()
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = torch.nn.Identity(), torch.nn.Identity()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".h." in name and p.ndim == 2:
                p.normal_()
                p /= torch.linalg.matrix_norm(p, 2)
            elif p.ndim == 2:
                p.normal_()
    return model


TOKENS = np.random.default_rng(13).integers(0, 13, (3, 10))


def logits_of(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.double().numpy()


def test_target_transformer_is_stock_gpt2():
    model = small_gpt2()
    target = theory.TargetTransformer.from_gpt2(model)
    np.testing.assert_allclose(target(TOKENS), logits_of(model), atol=1e-5)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("scratch", ["fresh", "cleared"])
def test_pruned_transformer_approaches_the_target(scratch, construction):
    stock = small_gpt2()
    target, errors = theory.TargetTransformer.from_gpt2(stock), []
    for n in (48, 144, 720):
        found = theory.approximate_transformer(
            target, n, n, n, seed=5, construction=construction, scratch=scratch, core=20
        )
        errors.append(np.abs(logits_of(found.model()) - logits_of(stock)).max())
    assert errors[2] < 1e-4
    assert errors[2] < errors[0] / 1000


def test_pruned_transformer_is_a_ticket(tmp_path):
    target = theory.TargetTransformer.from_gpt2(small_gpt2(n_layer=1))
    found = theory.approximate_transformer(target, 120, 120, 240, seed=2, core=20)
    model = found.model()
    model.save_ticket(tmp_path / "ticket")
    header = hf_slt.verify_ticket(tmp_path / "ticket")
    assert header.options["seed"] == 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert torch.equal(again(torch.from_numpy(TOKENS)).logits, model(torch.from_numpy(TOKENS)).logits)
    # Which target stock GPT-2 draws from a seed depends on the version of transformers, and so the error too.
    np.testing.assert_allclose(logits_of(again), target(TOKENS), atol=1e-2)
    for name, mask in again.mask_arrays().items():
        assert (mask == found.masks[name]).all()
    # nothing but masks and the target's embeddings is stored
    header, _ = model.describe()
    assert {name for name, entry in header.tensors.items() if entry.kind == "trained"} == {"wte", "wpe"}


def test_deeper_targets_err_more():
    means = []
    for depth in (1, 3):
        target = theory.TargetTransformer.from_gpt2(small_gpt2(n_layer=depth))
        errors = []
        for seed in range(4):
            found = theory.approximate_transformer(target, 48, 48, 96, seed, construction="balanced", core=20)
            errors.append(np.abs(logits_of(found.model()) - target(TOKENS)).max())
        means.append(np.mean(errors))
    assert means[1] > means[0]


def test_targets_outside_the_theorem_are_named():
    model = small_gpt2()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] = 1.0
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.bias is not zero"):
        theory.TargetTransformer.from_gpt2(model)
    with pytest.raises(ValueError, match="LayerNorm"):
        theory.TargetTransformer.from_gpt2(
            GPT2LMHeadModel(
                GPT2Config(vocab_size=5, n_embd=4, n_head=1, n_layer=1, activation_function="relu")
            )
        )
    model.config.activation_function = "gelu_new"
    with pytest.raises(ValueError, match="gelu_new"):
        theory.TargetTransformer.from_gpt2(model)
