"""low_rank and apollo against the sequences of the authors' step functions, in float64."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.memory import _apollo, _low_rank, _moments, _projections
from optperm.memory._matrices import plan_matrices

pytestmark = pytest.mark.usefixtures("lenient")

# Params at the start, gradients, and the params after some `steps` of each sequence: of matrices and a
# bias.
with np.load(pathlib.Path(__file__).parents[1] / "data" / "low_rank_reference.npz") as file:
    REFERENCE = dict(file)
LEAVES = ("wide", "tall", "square")
RATE, RANK, EVERY = 0.05, 3, 10
# The place of eps in a formula then makes no difference.
ADAM = optax.scale_by_adam(eps=1e-30)


def correction(t):
    """The factor of Adam's bias correction."""
    return jnp.sqrt(1 - 0.999 ** t.astype(float)) / (1 - 0.9 ** t.astype(float))


def update_without_correction(g, state, params=None):
    u, state = ADAM.update(g, state, params)
    return optax.tree.scale(1 / correction(state.count), u), state


# Adam's direction as the authors limit it, and their bias correction after the step.
UNCORRECTED = optax.GradientTransformation(ADAM.init, update_without_correction)
CORRECTION = optax.scale_by_schedule(lambda t: correction(t + 1))
svd = functools.partial(optperm.low_rank, rank=RANK, every=EVERY, projection="svd")
apollo = functools.partial(optperm.apollo, rank=RANK, every=EVERY, scale=1.0)
mini = functools.partial(optperm.apollo, rank=1, every=EVERY, by="tensor", scale=128**0.5)
SEQUENCES = {
    "galore_sgd_params": svd(optax.identity(), residual=None, scale=0.25),
    "galore_adam_params": svd(ADAM, residual=None, carry=False, scale=0.25),
    "galore_adam_one_basis": svd(ADAM, residual=None, carry=False, scale=0.25, every=100),
    "fira_adam_corrected": svd(ADAM, carry=False),
    "fira_adam_corrected_scale_quarter": svd(ADAM, carry=False, scale=0.25),
    "fira_adam_no_limiter": svd(ADAM, carry=False, limit=None),
    "fira_adam_official": optax.chain(svd(UNCORRECTED, carry=False), CORRECTION),
    "fira_adam_official_no_bias_correction": svd(UNCORRECTED, carry=False),
    "rotate_plain": svd(ADAM, residual=None),
    "rotate_fira": svd(ADAM),
    "rotate_fira_scale_half": svd(ADAM, scale=0.5),
    "apollo_corrected": apollo(ADAM),
    "apollo_no_limiter": apollo(ADAM, limit=None),
    "apollo_official": optax.chain(apollo(UNCORRECTED), CORRECTION),
    "apollo_mini_corrected": mini(ADAM),
    "apollo_mini_official": optax.chain(mini(UNCORRECTED), CORRECTION),
}
USUAL = [
    ("galore_adam_params", "tall"),
    ("fira_adam_official", "square"),
    ("rotate_fira", "wide"),
    ("apollo_official", "wide"),
    ("apollo_mini_corrected", "tall"),
]


def of_leaf(name, leaf):
    """The matrix and the bias of an entry of the file."""
    return {"matrix": REFERENCE[f"{name}_{leaf}"], "bias": REFERENCE[f"{name}_bias"]}


def gram_basis_of_any_signs(g, rank):
    """The singular vectors, whose signs LAPACK may choose; they change from one basis to the next."""
    flips = jnp.where(jnp.arange(rank) % 2 == 0, -1.0, 1.0)
    return _projections.gram_basis(g, rank) * jnp.where(jnp.sum(g) > 0, flips, -flips)


@pytest.mark.parametrize(
    ("name", "leaf"),
    support.every_night([(name, leaf) for name in SEQUENCES for leaf in LEAVES], USUAL),
)
def test_params_after_each_step_are_those_of_the_authors(name, leaf, x64, monkeypatch):
    """APOLLO's with the random bases of the file, the others with singular vectors of any signs."""
    tx = SEQUENCES[name]
    monkeypatch.setattr(_low_rank, "gram_basis", gram_basis_of_any_signs)
    if name.startswith("apollo"):
        method = "apollo_mini" if "mini" in name else "apollo"
        bases = jnp.asarray(REFERENCE[f"{method}_bases_{leaf}"])
        monkeypatch.setattr(_apollo, "fold", lambda _, number: number)
        monkeypatch.setattr(_apollo, "draw_gaussian_basis", lambda number, *_: bases[number])

    def step(carry, grads):
        params, opt_state = carry
        updates, opt_state = tx.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
        return (params, opt_state), params

    @jax.jit
    def run(params, grads):
        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    trail = run(of_leaf("params0", leaf), of_leaf("grads", leaf))
    found = jax.tree.map(lambda x: x[REFERENCE["steps"]], trail)
    chex.assert_trees_all_close(found, of_leaf(name, leaf), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["svd", "power"])
def test_power_steps_and_carried_moments_are_those_of_ldadam(kind, x64):
    """With a basis of the momentum and the gradient, as LDAdam has it."""
    rho, b1, b2 = 0.908, 0.908, 0.99
    adam = optax.scale_by_adam(b1, b2, 1e-30)
    matrix = plan_matrices({"w": jnp.zeros((8, 12))}, RANK, "smaller", None)["w"]

    def step(carry, g):
        w, state, basis = carry
        t = state.count
        mean = state.mu["w"] / jnp.where(t > 0, 1 - b1**t, 1.0)
        target = jnp.where(t > 0, rho * basis @ mean + (1 - rho) * g, g)
        new = _projections.gram_basis(target, RANK)
        if kind == "power":
            new = jnp.where(t > 0, _projections.power_basis(target, basis), new)
        carry_adam = _moments.find_formulas(state, b1=b1, b2=b2)
        change = _moments.Change(matrix, basis, new, t > 0)
        moments = [(state.mu["w"], state.nu["w"])]
        ((mu, nu),) = _moments.carry_moments(carry_adam, change, moments)
        u, state = adam.update({"w": new.T @ g}, state._replace(mu={"w": mu}, nu={"w": nu}))
        w = w - RATE * new @ u["w"]
        return (w, state, new), w

    start = REFERENCE["params0_wide"], adam.init({"w": jnp.zeros((RANK, 12))}), jnp.zeros((8, RANK))
    _, trail = jax.jit(lambda start, grads: jax.lax.scan(step, start, grads))(
        start, REFERENCE["grads_wide"]
    )
    found = trail[REFERENCE["steps"]]
    np.testing.assert_allclose(found, REFERENCE[f"ldadam_{kind}_wide"], rtol=0.0, atol=1e-9)
