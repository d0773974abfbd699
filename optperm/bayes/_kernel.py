"""The kernel of constant SGD: the noise of its gradients, and the steps that sample the posterior."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._control_variates import anchor_like
from optperm.bayes._forms import FORMS, Form, Preconditioner, Scalar
from optperm.core import checks
from optperm.core.dtypes import cast_like
from optperm.core.shapes import Array, Float, Float32, Int32, Params, PyTree, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.trees import mask_like


class NoiseKernel(NamedTuple):
    r"""Noise, curvature and basis of constant SGD, learned by `optperm.bayes.learn_kernel`.

    Let :math:`C` be the covariance of one example's gradient, :math:`A` the Hessian of the mean loss,
    and :math:`s = 2 S T / N`. The columns :math:`w_i` of a basis :math:`W` satisfy

    .. math::
      W^\top C W = \operatorname{diag}(\Lambda), \qquad H = W \operatorname{diag}(h) W^\top

    Two quantities limit the steps :math:`h_i`: the ratio :math:`\rho` of the batches' noise to the
    injected noise, and the curvature :math:`a_i \approx w_i^\top A w_i`. Injected noise adds the rest:

    .. math::
      h_i = \frac{s}{\max\left(\Lambda_i (1 + 1 / \rho), s a_i / c\right)}, \qquad
      b_i = \frac{s}{h_i} - \Lambda_i, \qquad
      \xi = W^{-\top} \operatorname{diag}(\sqrt{b / S}) z

    The noise of a step :math:`-H (g + \xi)` therefore has the covariance
    :math:`W \operatorname{diag}(h (\Lambda + b) h / S) W^\top = (2 T / N) H` for any a and c.

    If :math:`W = I`, :math:`\Lambda` is the diagonal of C, or the mean of the diagonal, and the noise of
    a step has the covariance :math:`(2 T / N) H + H E H / S` with :math:`E = C - \Lambda`. For small
    steps, the covariance of the draws is :math:`\Sigma = T (N A)^{-1} + \Delta`, where (equation 13 of
    Mandt et al.)

    .. math::
      H A \Delta + \Delta A H = \tfrac{1}{S} H E H

    In coordinates in which :math:`H^{1/2} A H^{1/2}` is a diagonal matrix k, the covariance of the
    posterior is :math:`(T / N) k^{-1}`. With :math:`\tilde E = H^{1/2} E H^{1/2}`, the solution is
    :math:`\Delta_{ij} = \tilde E_{ij} / (S (k_i + k_j))`, the integral of
    :math:`e^{-k t} \tilde E e^{-k t} / S`. If :math:`-\alpha s I \preceq \tilde E \preceq \beta s I`,
    then for any A, the variance of *every* linear function of the params is between :math:`1 - \alpha`
    and :math:`1 + \beta` times its posterior variance. The batches contribute a fraction
    :math:`h_i \Lambda_i / s` of the noise, at most :math:`\varphi = \rho / (1 + \rho)`. Hence, if
    :math:`r_{\min} \le 1 \le r_{\max}` are the extreme eigenvalues of
    :math:`\Lambda^{-1/2} C \Lambda^{-1/2}`,

    .. math::
      1 - \varphi (1 - r_{\min}) \;\le\; \frac{u^\top \Sigma u}{u^\top T (N A)^{-1} u} \;\le\;
      1 + \varphi (r_{\max} - 1) \quad \text{for all } u

    Learning lowers :math:`\rho` until both bounds are within a fifth of 1, or :math:`\varphi` is
    0.015.

    A kernel is a tree of arrays, which Orbax and pickle can save.

    Attributes:
      basis: The form: `Full`, whose `w` is :math:`W`, (D, D); `Diagonal` or `Scalar`, where
        :math:`W = I`.
      noise: :math:`\Lambda`: an array (D,) for the full preconditioner, a tree like params for the
        diagonal preconditioner, or a single number for the scalar preconditioner.
      curvature: :math:`a`, of the same form: :math:`w_i^\top A w_i` corrected for momentum, for the
        spread of the batches' curvatures and for `excess`; infinite while it is not known, so that
        no step is taken.
      noise_ratio: :math:`\rho`, the maximum ratio of the batches' noise to the injected noise.
      max_noise_ratio: The maximum of :math:`\rho` that was asked for.
      stability: :math:`\lambda_{\max}(H A) (1 - \mu) / (1 + \mu)`, estimated from the last window.
      max_stability: c, the maximum of `stability`.
      excess: The factor that multiplies the :math:`a_i` to bring `stability` down to c.
      drift: The ratio of the noise in the last window to the noise in the window before.
      correlation: Bounds on the extreme eigenvalues :math:`r_{\min}` and :math:`r_{\max}` of
        :math:`\Lambda^{-1/2} C \Lambda^{-1/2}`, at least two standard errors beyond the estimates of the
        last window; 1 and 1 for the full preconditioner.
      estimates: The number of estimates of C in the last window.
      num_data: N.
      batch_size: S.
      momentum: :math:`\mu`.
      noise_left: The fraction of the batches' noise that control variates leave; 1 without them.
      anchor: The point :math:`\theta^*` of the control variates and its full gradient; () without them.
    """

    basis: Form
    noise: PyTree[Float[Array, "..."]]
    curvature: PyTree[Float[Array, "..."]]
    noise_ratio: Float32[Array, ""]
    max_noise_ratio: Float32[Array, ""]
    stability: Float32[Array, ""]
    max_stability: Float32[Array, ""]
    excess: Float32[Array, ""]
    drift: Float32[Array, ""]
    correlation: Float32[Array, "2"]
    estimates: Int32[Array, ""]
    num_data: Int32[Array, ""]
    batch_size: Int32[Array, ""]
    momentum: Float32[Array, ""]
    noise_left: Float32[Array, ""]
    anchor: Any  # Anchor, or ()

    @classmethod
    def unknown(
        cls, params: Params, preconditioner: Preconditioner, *, control_variates: bool = True
    ) -> NoiseKernel:
        """Return a kernel without noise and of unknown, infinite curvature, which takes no steps.

        It has the structure, shapes and dtypes of every kernel for these params, so it is a target with
        which Orbax restores a kernel.

        Args:
          params: The params, a tree.
          preconditioner: "full", "diagonal" or "scalar".
          control_variates: Whether the kernel has control variates.
        """
        checks.check_choice("preconditioner", preconditioner, tuple(FORMS))
        form = FORMS[preconditioner].like(params)
        zero, one = jnp.zeros([], jnp.float32), jnp.ones([], jnp.float32)
        none = jnp.zeros([], jnp.int32)
        return cls(
            basis=form,
            noise=form.zeros(params),
            curvature=optax.tree.full_like(form.zeros(params), jnp.inf),
            noise_ratio=one,
            max_noise_ratio=one,
            stability=zero,
            max_stability=one,
            excess=one,
            drift=one,
            correlation=jnp.ones(2, jnp.float32),
            estimates=none,
            num_data=none,
            batch_size=none,
            momentum=zero,
            noise_left=one,
            anchor=anchor_like(params) if control_variates else (),
        )

    def scale(self, temperature: jax.Array | float = 1.0) -> jax.Array:
        """Return s = 2 S T / N.

        Args:
          temperature: T.
        """
        size, n = (jnp.asarray(x, jnp.float32) for x in (self.batch_size, self.num_data))
        return 2 * size / n * temperature

    def tempered(self, temperature: jax.Array | float) -> NoiseKernel:
        r"""Return the kernel for draws at T: with control variates, :math:`T \Lambda` is the noise.

        This noise is proportional to :math:`|\theta - \theta^*|^2`, which is T times as large as at 1.
        Without control variates, the noise does not depend on T.

        Args:
          temperature: T.
        """
        if not self.anchor:
            return self
        t = jnp.asarray(temperature)
        return self._replace(noise=jax.tree.map(lambda x: t.astype(x.dtype) * x, self.noise))

    def step_sizes(self, scale: jax.Array, rate: jax.Array | float = 1.0) -> Any:
        """Return h, of the form of the noise; an entry without noise and curvature takes no step.

        Args:
          scale: s.
          rate: Factor on c and rho.
        """

        # h_i = s / max(Lambda_i (1 + 1 / rho), s a_i / c)
        def of_entry(noise: jax.Array, curvature: jax.Array) -> jax.Array:
            s, c, rho = (
                jnp.asarray(x, noise.dtype)
                for x in (scale, self.max_stability * rate, self.noise_ratio * rate)
            )
            h = s / jnp.maximum(noise * (1 + 1 / rho), s * curvature / c)
            return jnp.where(jnp.isfinite(h), h, 0.0)

        return jax.tree.map(of_entry, self.noise, self.curvature)

    def injected(self, h: Any, scale: jax.Array) -> Any:
        """Return b, of the form of the noise: the variance to add to Lambda for a sum of s / h.

        Args:
          h: The steps.
          scale: s.
        """

        # b_i = s / h_i - Lambda_i
        def of_entry(noise: jax.Array, h: jax.Array) -> jax.Array:
            b = scale.astype(h.dtype) / jnp.where(h > 0, h, 1.0) - noise
            return jnp.where(h > 0, jnp.maximum(b, 0.0), 0.0)

        return jax.tree.map(of_entry, self.noise, h)

    def batch_fraction(self) -> jax.Array:
        r"""Return :math:`\max_i h_i \Lambda_i / s`, the maximum fraction of noise from the batches."""
        s = self.scale()
        fractions = jax.tree.map(
            lambda h, noise: jnp.max(h * noise / s.astype(h.dtype), initial=0.0),
            self.step_sizes(s),
            self.noise,
        )
        return functools.reduce(jnp.maximum, jax.tree.leaves(fractions))

    def noise_over_stability(self, scale: Any, limit: Any) -> jax.Array:
        r"""Return :math:`r = \max_i \Lambda_i (1 + 1 / \rho) c / (s a_i)`.

        In :math:`h_i = s / \max(\Lambda_i (1 + 1 / \rho), s a_i / c)`, s is proportional to S. So with
        batches of r S examples, the noise of the batches shortens no step.

        Args:
          scale: s.
          limit: c.
        """

        def of_entry(noise: jax.Array, a: jax.Array) -> jax.Array:
            s, c, rho = (jnp.asarray(x, noise.dtype) for x in (scale, limit, self.noise_ratio))
            # A flat direction has no limit of stability
            ratio = noise * (1 + 1 / rho) * (c / s) / jnp.where(a > 0, a, 1.0)
            return jnp.max(jnp.where((a > 0) & jnp.isfinite(a), ratio, 0.0), initial=0.0)

        ratios = jax.tree.map(of_entry, self.noise, self.curvature)
        return functools.reduce(jnp.maximum, jax.tree.leaves(ratios))

    def anchor_distance(self) -> jax.Array:
        r"""Return about how far the anchor is from an optimum, in posterior standard deviations.

        Along :math:`w_i`, this is :math:`\sqrt{N / m_i} |w_i^\top \nabla L(\theta^*)|` with
        :math:`m_i = a_i (1 + \mu) / (1 - \mu)`. The maximum over i is returned.
        """
        g = self.basis.coordinates(self.anchor.full_grad, self.anchor.full_grad)
        factor = (1 + self.momentum) / (1 - self.momentum)

        def along(g: jax.Array, a: jax.Array) -> jax.Array:
            n, m = self.num_data.astype(g.dtype), a * factor.astype(a.dtype)
            root = jnp.sqrt(n / jnp.where(m > 0, m, 1.0))
            return jnp.max(jnp.where(m > 0, root * jnp.abs(g), 0.0), initial=0.0)

        curvature = self.curvature
        if isinstance(self.basis, Scalar):
            curvature = jax.tree.map(lambda g: jnp.broadcast_to(curvature, g.shape), g)
        return functools.reduce(jnp.maximum, jax.tree.leaves(jax.tree.map(along, g, curvature)))

    def variance_errors(self) -> tuple[jax.Array, jax.Array]:
        """Return the maximum fractions by which correlation makes variances too small and too large."""
        fraction = self.noise_ratio / (1 + self.noise_ratio)
        too_small = fraction * jnp.maximum(1 - self.correlation[..., 0], 0.0)
        return too_small, fraction * jnp.maximum(self.correlation[..., 1] - 1, 0.0)

    def precondition(self, grads: Updates, h: Any) -> Updates:
        """Return H g, a tree like g, in its dtypes.

        Args:
          grads: g, a tree like params.
          h: The steps.
        """
        return precondition(self.basis, h, grads)


def precondition(basis: Form, h: Any, grads: Updates) -> Updates:
    """Return H g = W diag(h) W^T g, a tree like g, in its dtypes."""
    moves = basis.params_of(basis.times(h, basis.coordinates(grads, h)), grads)
    return cast_like(moves, mask_like(grads, moves))


def check_kernel(
    kernel: NoiseKernel,
    params: Params,
    preconditioner: Preconditioner | None = None,
    **numbers: int,
) -> None:
    """Raise unless a kernel belongs to these params and numbers, and its curvature is known.

    Args:
      kernel: The kernel.
      params: The params.
      preconditioner: The required form; None for any form.
      **numbers: The values required for the fields of these names, checked if the kernel is concrete.

    Raises:
      TypeError: If `kernel` is not a `NoiseKernel`.
      ValueError: If the kernel has an axis of chains, belongs to other params, dtypes or numbers, or has
        no finite curvature.
    """
    check_is_kernel(kernel)
    if preconditioner is not None and type(kernel.basis) is not FORMS[preconditioner]:
        form = type(kernel.basis).__name__.lower()
        raise ValueError(
            f"kernel is {form}, but preconditioner is {preconditioner!r}: pass {form!r} or None."
        )
    basis = type(kernel.basis)
    for name, found, wanted in (
        ("kernel.basis", kernel.basis, jax.eval_shape(basis.like, params)),
        ("kernel.noise", kernel.noise, jax.eval_shape(lambda p: basis.like(p).zeros(p), params)),
    ):
        checks.check_same_tree(name, found, wanted, source="params")
    if kernel.anchor:
        checks.check_same_tree(
            "kernel.anchor.params", kernel.anchor.params, params, source="params"
        )
    for name, number in numbers.items():
        found = getattr(kernel, name)
        if can_be_seen(found) and int(found) != number:
            raise ValueError(
                f"kernel is for {name}={found}, but {name} is {number}: learn a new kernel."
            )
    leaves = jax.tree.leaves(kernel.curvature)
    if all(map(can_be_seen, leaves)) and not all(np.all(np.isfinite(leaf)) for leaf in leaves):
        raise ValueError(
            "kernel has no finite curvature, which learn_kernel measures: learn a new kernel."
        )


def check_is_kernel(kernel: Any) -> None:
    """Raise unless this is the kernel of a single chain."""
    if not isinstance(kernel, NoiseKernel):
        raise TypeError(
            f"kernel must be a NoiseKernel, got {type(kernel).__name__}: learn a kernel with "
            "optperm.bayes.learn_kernel. To restore a saved kernel with Orbax, pass the target "
            "optperm.bayes.NoiseKernel.unknown(params, preconditioner)."
        )
    if jnp.ndim(kernel.stability):
        raise ValueError(
            f"kernel has an axis of chains (of length {len(kernel.stability)}), each with its own: pass "
            "one of them, such as jax.tree.map(lambda a: a[0], kernel)."
        )
