r"""Bound, from gradients of batches, the extreme eigenvalues of the noise correlation if W = I.

E. Oja, "A Simplified Neuron Model as a Principal Component Analyzer", J. Math. Biology 15, 1982.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optperm.bayes._forms import Form, inner
from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.shapes import Array, Float, Float32, PyTree
from optperm.core.shardings import explicit_sharding

# The maximum relative change of a variance by correlation, and the minimum fraction of batch noise.
_TOLERANCE, _LEAST_FRACTION = 0.2, 0.015
# The bounds are this many standard errors beyond the estimates of the eigenvalues.
_ERRORS = 2.0
# The squares of larger eigenvalues would overflow.
_LARGEST = 1e9


class Extremes(NamedTuple):
    r"""Statistics on the extreme eigenvalues of :math:`R = \Lambda^{-1/2} C \Lambda^{-1/2}` in a window.

    All means have weights that grow linearly with the number of the estimate.

    Attributes:
      probes: Unit vectors :math:`x` for the smallest and the largest eigenvalue: two trees like params,
        or () for the full form.
      quotients: The means of :math:`r = x^\top \hat R x`.
      squares: The means of :math:`r^2`.
      losses: The means of :math:`\gamma \| \hat R x - r x \|^2`.
    """

    probes: PyTree[Float[Array, "..."]]
    quotients: Float32[Array, "2"]
    squares: Float32[Array, "2"]
    losses: Float32[Array, "2"]


def restart(seen: Extremes, form: Form, noise: Any) -> Extremes:
    """Return the start of a window with other noise; its unit probes are 0 in entries without noise."""
    has_noise = jax.tree.map(jnp.sign, noise)

    def unit(x: Any) -> Any:
        kept = form.times(has_noise, x)
        norm = jnp.sqrt(inner(kept, kept))
        is_any = norm > 0
        return jax.tree.map(
            lambda k, x: jnp.where(is_any, k / jnp.where(is_any, norm, 1).astype(x.dtype), x),
            kept,
            x,
        )

    return optax.tree.zeros_like(seen)._replace(probes=tuple(map(unit, seen.probes)))


def along_probes(form: Form, noise: Any, probes: tuple[Any, ...]) -> list[Any]:
    """Return Lambda^(-1/2) x for each probe x; zero in entries without noise."""
    return [form.times(_inverse_root(noise), x) for x in probes]


def times_rows(rows: Any, v: Any) -> Any:
    """Return the sum of d (d^T v) over the rows d of a tree with a leading axis."""

    # A matrix product is faster on a CPU, which adds the numbers of a sum one by one
    def along(d: jax.Array, v: jax.Array) -> jax.Array:
        sharding = explicit_sharding(d)
        whole = sharding and sharding.update(spec=PartitionSpec())
        return jnp.tensordot(d, v.astype(d.dtype), axes=v.ndim, out_sharding=whole)

    parts = jax.tree.leaves(jax.tree.map(along, rows, v))
    dtype = accumulation_dtype(parts)
    total = computed_once(sum((p.astype(dtype) for p in parts), start=jnp.zeros([], dtype)))
    return jax.tree.map(lambda d: jnp.tensordot(total.astype(d.dtype), d, axes=1), rows)


def iterate(seen: Extremes, form: Form, noise: Any, products: list[Any], n: jax.Array) -> Extremes:
    r"""Return the extremes after one more batch, with Oja's rule for the batch's :math:`\hat R`.

    .. math::
      r = x^\top \hat R x, \qquad
      x \leftarrow \frac{x \pm \gamma (\hat R x - r x)}{\| \cdot \|}, \qquad
      \gamma = \frac{\min(2 / (n + 1), 1 / 2)}{r_{\max}}

    `products` are :math:`\hat C \Lambda^{-1/2} x` for each probe, and n includes this estimate.
    """
    if not products:
        return seen
    rate = 2 / (n + 1)
    turned = [form.times(_inverse_root(noise), product) for product in products]
    pairs = list(zip(seen.probes, turned, strict=True))
    dtype = seen.quotients.dtype
    r = jnp.stack([inner(x, y).astype(dtype) for x, y in pairs])
    # |R x - r x|^2 = |R x|^2 - r^2, since |x| = 1
    residuals = jnp.stack([inner(y, y).astype(dtype) for _, y in pairs]) - r**2
    residuals = jnp.maximum(residuals, 0.0)
    is_sound = jnp.all((jnp.abs(r) < _LARGEST) & (residuals < _LARGEST**2))
    quotients = seen.quotients + rate * (r - seen.quotients)
    step = jnp.minimum(rate, 0.5) / jnp.maximum(quotients[1], 1.0)
    norms = jnp.sqrt(1 + step**2 * residuals)
    probes = tuple(
        jax.tree.map(
            lambda x, y, r=r[i], norm=norms[i], sign=sign: (
                (x + (sign * step).astype(x.dtype) * (y - r.astype(x.dtype) * x))
                / norm.astype(x.dtype)
            ),
            *pairs[i],
        )
        for i, sign in enumerate((-1.0, 1.0))
    )
    new = Extremes(
        probes=probes,
        quotients=quotients,
        squares=seen.squares + rate * (r**2 - seen.squares),
        losses=seen.losses + rate * (step * residuals - seen.losses),
    )
    return optax.tree.where(is_sound, new, seen)


def bounds(seen: Extremes, form: Form, noise: Any, new_noise: Any, n: jax.Array) -> jax.Array:
    r"""Return bounds on :math:`r_{\min}` and :math:`r_{\max}`, (2,); both are 1 without estimates.

    If the next window replaces :math:`\Lambda` by :math:`\Lambda'`, the bounds are

    .. math::
      \frac{\bar r \pm e}{x^\top \Lambda' \Lambda^{-1} x}, \qquad
      e = 2 \,\mathrm{se} + \bar l + \frac{\bar r_{\max}}{4 \log(1 + n)}

    No estimate has more than the fraction 2 / (n + 1) of the weight, so
    :math:`\mathrm{se}^2 \le \frac{2}{n + 1} \operatorname{Var} r`. The loss :math:`l` bounds the error
    due to the noise of :math:`\hat R x`, whose variance along eigenvector j is :math:`V_j`. With a
    constant :math:`\gamma`, the component of x along j has the mean square
    :math:`\gamma V_j / (2 (r_{\max} - r_j))`, and changes the quotient by :math:`\gamma V_j / 2` for any
    gap. The sum over j is at most :math:`\frac{\gamma}{2} E \| \hat R x - r x \|^2`; l is twice this
    bound, because the iteration lags behind a decreasing :math:`\gamma`. The last term bounds the error
    due to other eigenvectors in x at the start of the window. With
    :math:`t = \sum \gamma \approx 2 \log(1 + n) / r_{\max}`, a component with the gap g decays as
    :math:`e^{-2 t g}`, so its error is at most :math:`g e^{-2 t g} \le 1 / (2 e t)` times its initial
    value.
    """
    if not seen.probes:
        return jnp.ones_like(seen.quotients)
    ratio = jax.tree.map(
        lambda new, old: jnp.where(old > 0, new / jnp.where(old > 0, old, 1.0), 0.0),
        new_noise,
        noise,
    )
    weights = jnp.stack([inner(x, form.times(ratio, x)) for x in seen.probes])
    weights = weights.astype(seen.quotients.dtype)
    n = n.astype(jnp.float32)
    variance = 2 / (n + 1) * jnp.maximum(seen.squares - seen.quotients**2, 0.0)
    lag = seen.quotients[1] / (4 * jnp.log1p(n))
    errors = _ERRORS * jnp.sqrt(variance) + seen.losses + lag
    outward = np.array([-1, 1], np.float32)
    found = (seen.quotients + errors * outward) / jnp.where(weights > 0, weights, 1)
    limits = jnp.clip(found, np.array([0, 1], np.float32), np.array([1, _LARGEST], np.float32))
    return jnp.where(jnp.all(weights > 0) & (n > 0), limits, 1.0)


def fraction_by_correlation(correlation: jax.Array) -> jax.Array:
    r"""Return the largest :math:`\varphi = \rho / (1 + \rho)` with variances right to a fifth.

    .. math:: \varphi \max(1 - r_{\min}, r_{\max} - 1) \le \tfrac15

    See `optperm.bayes.NoiseKernel`. The result is at least 0.015, even if errors then exceed a fifth,
    because chains hardly move below 0.015.
    """
    error = jnp.maximum(jnp.maximum(1 - correlation[0], correlation[1] - 1), 1e-6)
    return jnp.maximum(_TOLERANCE / error, _LEAST_FRACTION)


def _inverse_root(noise: Any) -> Any:
    return jax.tree.map(
        lambda c: jnp.where(c > 0, 1 / jnp.sqrt(jnp.where(c > 0, c, 1.0)), 0.0), noise
    )
