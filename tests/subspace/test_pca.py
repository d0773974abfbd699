"""Principal components against a float64 singular value decomposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas
import support

import optperm


def snapshots_with(spectrum, n=8_011, seed=0, dtype=np.float32):
    """Snapshots around a point of size 1 with given singular values, float32 rounding included."""
    m = len(spectrum) + 1
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(np.eye(m) - 1 / m + 1e-3 * rng.normal(size=(m, m)))[0][:, : m - 1]
    v = np.linalg.qr(rng.normal(size=(n, m - 1)))[0].T
    return ((u * spectrum) @ v + rng.normal(size=n)).astype(dtype)


def exact(snapshots, k):
    x = np.asarray(snapshots, np.float64).reshape(len(snapshots), -1)
    return np.linalg.svd(x - x.mean(axis=0), full_matrices=False)[2][:k]


def quality(basis, wanted):
    """The smallest cosine of the principal angles, and the error of orthonormality."""
    b = np.concatenate(
        [np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in jax.tree.leaves(basis)], 1
    )
    cosines = np.linalg.svd(b @ wanted.T)[1]
    return cosines.min(), np.abs(b @ b.T - np.eye(len(b))).max()


@pytest.mark.parametrize("decades", [0, 3, 5])
def test_as_exact_as_a_float64_decomposition(decades):
    """With singular values over several decades, where a float32 Gram matrix loses the small ones."""
    spectrum = 300 * np.logspace(0, -decades, 14)
    snapshots = snapshots_with(spectrum)
    wanted = exact(snapshots, 10)
    cosine, error = quality(optperm.pca_basis(snapshots, 10), wanted)
    assert cosine >= 0.99999
    assert error <= 1e-5
    x = snapshots - snapshots.mean(axis=0)
    vectors = np.linalg.eigh(x @ x.T)[1][:, ::-1][:, :10]
    plain = vectors.T @ x
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    if decades >= 3:
        assert quality(plain, wanted)[1] > 100 * error


def test_components_in_the_noise_are_still_orthonormal():
    """Where the Gram matrix itself has no digits left a second pass makes the rows orthonormal."""
    snapshots = snapshots_with(300 * np.logspace(0, -6.5, 14))
    assert quality(optperm.pca_basis(snapshots, 14), exact(snapshots, 14))[1] <= 1e-5


def tree_of(snapshots):
    return {"a": snapshots[:, :6_000].reshape(-1, 30, 200), "b": (snapshots[:, 6_000:],)}


def test_any_tree_any_transformation_gives_the_same_rows():
    """Leaf by leaf, jitted, under vmap outside and inside jit, pmap and shard_map."""
    snapshots = snapshots_with(np.logspace(0, -2, 6))
    whole = optperm.pca_basis(snapshots, 4)
    tree = tree_of(snapshots)
    basis = optperm.pca_basis(tree, 4)
    assert basis["a"].shape == (4, 30, 200)
    flat = np.concatenate([basis["a"].reshape(4, -1), basis["b"][0]], axis=1)
    np.testing.assert_allclose(flat, whole, atol=1e-8)
    compute = jax.jit(lambda tree: optperm.pca_basis(tree, 4))
    support.assert_same_bits(compute(tree), basis)
    for mapping in replicas.MAPPINGS.values():
        mapped = mapping(compute, 2)(replicas.stack([tree, tree]))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-8), mapped, basis)


def test_dtypes_of_the_rows():
    """Rows are float32 for 16-bit leaves, and float64 for float64 ones."""
    with jax.enable_x64(True):
        snapshots = {
            name: jnp.asarray(np.random.default_rng(0).normal(size=(5, 9)), name)
            for name in ("float16", "bfloat16", "float32", "float64")
        }
        basis = optperm.pca_basis(snapshots, 3)
        assert [str(basis[name].dtype) for name in snapshots] == ["float32"] * 3 + ["float64"]
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), snapshots)
        flat = np.concatenate(jax.tree.leaves(wide), axis=1)
        cosine, error = quality(basis, exact(flat, 3))
        assert cosine > 1 - 1e-6
        assert error < 1e-6


def test_the_sign_of_a_row_is_that_of_the_furthest_snapshot():
    """Turning all displacements round turns the rows round; the order of snapshots does not matter."""
    snapshots = snapshots_with(np.logspace(0, -1, 5))
    basis = np.asarray(optperm.pca_basis(snapshots, 3))
    along = (snapshots - snapshots.mean(axis=0)) @ basis.T
    assert np.all(along[np.abs(along).argmax(axis=0), np.arange(3)] > 0)
    np.testing.assert_allclose(optperm.pca_basis(-snapshots, 3), -basis, atol=1e-6)
    np.testing.assert_allclose(optperm.pca_basis(snapshots[::-1], 3), basis, atol=1e-6)


def test_only_the_valid_snapshots_count():
    """Rows past `num_snapshots` are left out, traced or not, whatever they hold."""
    snapshots = snapshots_with(np.logspace(0, -1, 5))
    padded = np.concatenate([snapshots, np.full_like(snapshots[:3], 7.0)])
    wanted = optperm.pca_basis(snapshots, 3)
    np.testing.assert_allclose(
        optperm.pca_basis(padded, 3, num_snapshots=len(snapshots)), wanted, atol=1e-7
    )
    traced = jax.jit(lambda x, count: optperm.pca_basis(x, 3, num_snapshots=count))
    np.testing.assert_allclose(traced(padded, len(snapshots)), wanted, atol=1e-7)
    assert not np.any(traced(padded, 1))
    for spoiled in (np.nan, np.inf):
        padded[len(snapshots) :] = spoiled
        for compute in (traced, lambda x, m: optperm.pca_basis(x, 3, num_snapshots=m)):
            np.testing.assert_allclose(compute(padded, len(snapshots)), wanted, atol=1e-7)


def test_what_the_snapshots_do_not_determine():
    """An error where Python can see it; rows of zeros, and never NaN, where it cannot."""
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    flat = x[:2][[0, 1, 0, 1, 1, 0]]
    with pytest.raises(ValueError, match=r"span 1 directions.*n_components=3"):
        optperm.pca_basis(flat, 3)
    compute = jax.jit(lambda x: optperm.pca_basis(x, 3))
    basis = np.asarray(compute(flat))
    np.testing.assert_allclose(np.linalg.norm(basis, axis=1), [1, 0, 0], atol=1e-6)
    assert not np.any(compute(np.ones_like(x)))
    assert not np.any(compute(np.where(x > 1, np.float32(np.nan), x)))
    with pytest.raises(ValueError, match=r"span 0 directions.*not finite"):
        optperm.pca_basis(np.where(x > 1, np.float32(np.nan), x), 3)


def test_there_is_no_derivative():
    """It is refused by name, where a derivative is asked for, and only there."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)), jnp.float32)

    def of_basis(x, stop):
        x = jax.lax.stop_gradient(x) if stop else x
        return jnp.sum(optperm.pca_basis(x, 3) ** 3)

    for differentiate in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f), static_argnums=1)):
        with pytest.raises(TypeError, match=r"no derivative.*stop_gradient\(snapshots\)"):
            differentiate(of_basis)(x, False)
        assert not np.any(differentiate(of_basis)(x, True))
