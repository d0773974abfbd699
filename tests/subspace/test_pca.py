"""Principal components against a float64 singular value decomposition."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas
import support
import valley

import optperm


def snapshots_with(spectrum, n=2_011, seed=0, dtype=np.float32):
    """Return snapshots around a point with entries of size 1, with given singular values."""
    m = len(spectrum) + 1
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(np.eye(m) - 1 / m + 1e-3 * rng.normal(size=(m, m)))[0][:, : m - 1]
    v = np.linalg.qr(rng.normal(size=(n, m - 1)))[0].T
    return ((u * spectrum) @ v + rng.normal(size=n)).astype(dtype)


def exact(snapshots, k):
    x = np.float64(snapshots)
    return np.linalg.svd(x - x.mean(axis=0), full_matrices=False)[2][:k]


def quality(basis, wanted):
    """Return the smallest cosine of the principal angles, and the error of orthonormality."""
    b = np.float64(valley.flat(basis))
    cosines = np.linalg.svd(b @ wanted.T)[1]
    return cosines.min(), np.abs(b @ b.T - np.eye(len(b))).max()


def test_components_over_many_decades_are_those_of_float64():
    """Find the small ones, which a float32 Gram matrix loses, and make rows orthonormal by a second pass
    where a float64 one has no digits left either."""
    for decades in (0, 3, 5):
        snapshots = snapshots_with(300 * np.logspace(0, -decades, 14))
        wanted = exact(snapshots, 10)
        cosine, error = quality(optperm.subspace.pca_basis(snapshots, 10), wanted)
        assert cosine >= 0.99999
        assert error <= 1e-5
        x = snapshots - snapshots.mean(axis=0)
        plain = np.linalg.eigh(x @ x.T)[1][:, ::-1][:, :10].T @ x
        plain /= np.linalg.norm(plain, axis=1, keepdims=True)
        assert decades < 3 or quality(plain, wanted)[1] > 100 * error
    snapshots = snapshots_with(300 * np.logspace(0, -6.5, 14))
    assert quality(optperm.subspace.pca_basis(snapshots, 14), exact(snapshots, 14))[1] <= 1e-5


@pytest.mark.parametrize("mapping", support.every_night(replicas.MAPPINGS, ["shard_map"]))
def test_rows_of_any_tree_under_any_mapping_are_the_same(mapping):
    snapshots = snapshots_with(np.logspace(0, -2, 6), n=811)
    whole = optperm.subspace.pca_basis(snapshots, 4)
    tree = {"a": snapshots[:, :600].reshape(-1, 30, 20), "b": (snapshots[:, 600:],)}
    basis = optperm.subspace.pca_basis(tree, 4)
    assert basis["a"].shape == (4, 30, 20)
    np.testing.assert_allclose(valley.flat(basis), whole, atol=1e-7)
    compute = replicas.MAPPINGS[mapping](lambda tree: optperm.subspace.pca_basis(tree, 4), 2)
    mapped = compute(replicas.stack([tree, tree]))
    chex.assert_trees_all_close(replicas.take(mapped, 1), basis, atol=1e-7, rtol=0)


def test_rows_of_every_dtype_are_float32_or_wider():
    with jax.enable_x64(True):
        drawn = np.random.default_rng(0).normal(size=(5, 9))
        snapshots = {name: drawn.astype(dtype) for name, dtype in support.DTYPES.items()}
        basis = optperm.subspace.pca_basis(snapshots, 3)
        *others, float64 = (str(basis[name].dtype) for name in snapshots)
        assert ({*others}, float64) == ({"float32"}, "float64")
        cosine, error = quality(basis, exact(valley.flat(jax.tree.map(np.float64, snapshots)), 3))
        assert cosine > 1 - 1e-6
        assert error < 1e-6


def test_sign_of_a_row_is_that_of_the_furthest_snapshot():
    """Turn rows with the displacements, but not with the order of snapshots."""
    snapshots = snapshots_with(np.logspace(0, -1, 5), n=811)
    basis = np.asarray(optperm.subspace.pca_basis(snapshots, 3))
    along = (snapshots - snapshots.mean(axis=0)) @ basis.T
    assert np.all(along[np.abs(along).argmax(axis=0), np.arange(3)] > 0)
    np.testing.assert_allclose(optperm.subspace.pca_basis(-snapshots, 3), -basis, atol=1e-6)
    np.testing.assert_allclose(optperm.subspace.pca_basis(snapshots[::-1], 3), basis, atol=1e-6)


def test_snapshots_past_their_number_do_not_count():
    """Leave rows past `num_snapshots` out, traced or not, even if they are not finite."""
    snapshots = snapshots_with(np.logspace(0, -1, 5), n=811)
    padded = np.concatenate([snapshots, np.full_like(snapshots[:3], 7.0)])
    wanted = optperm.subspace.pca_basis(snapshots, 3)
    traced = jax.jit(lambda x, count: optperm.subspace.pca_basis(x, 3, num_snapshots=count))
    for filling in (7.0, np.nan, np.inf):
        padded[len(snapshots) :] = filling
        for compute in (traced, lambda x, m: optperm.subspace.pca_basis(x, 3, num_snapshots=m)):
            np.testing.assert_allclose(compute(padded, len(snapshots)), wanted, atol=1e-7)
        assert not np.any(traced(padded, 1))


def test_components_that_snapshots_do_not_determine_are_refused_or_zero():
    """Raise where Python can see it, and give rows of zeros, and never NaN, where it cannot."""
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    flat, spoiled = x[:2][[0, 1, 0, 1, 1, 0]], np.where(x > 1, np.float32(np.nan), x)
    for snapshots, message in (
        (flat, r"span too few directions .*: 1 \(.*, fewer than n_components=3"),
        (spoiled, r"span too few directions .*: 0 \(0 if their squares are not finite\)"),
    ):
        with pytest.raises(ValueError, match=message):
            optperm.subspace.pca_basis(snapshots, 3)
    compute = jax.jit(lambda x: optperm.subspace.pca_basis(x, 3))
    np.testing.assert_allclose(np.linalg.norm(compute(flat), axis=1), [1, 0, 0], atol=1e-6)
    for snapshots in (np.ones_like(x), spoiled):
        assert not np.any(compute(snapshots))


def test_derivative_of_a_basis_is_refused():
    """Refuse it by name where it is asked for, but not of snapshots that are stopped."""
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)

    def of_basis(x, stop):
        x = jax.lax.stop_gradient(x) if stop else x
        return jnp.sum(optperm.subspace.pca_basis(x, 3) ** 3)

    for differentiate in (jax.grad, jax.jacfwd):
        with pytest.raises(TypeError, match=r"no derivative.*stop_gradient\(snapshots\)"):
            jax.eval_shape(lambda x, f=differentiate: f(of_basis)(x, False), x)
    assert not np.any(jax.jit(jax.grad(of_basis), static_argnums=1)(x, True))
