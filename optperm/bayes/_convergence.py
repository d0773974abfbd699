"""R-hat and effective sample sizes, for the convergence of chains and the precision of their means.

A. Vehtari et al., "Rank-Normalization, Folding, and Localization: An Improved R-hat for Assessing
Convergence of MCMC", Bayesian Analysis 16(2), 2021.
"""

import numpy as np


def convergence(values: np.ndarray) -> tuple[float, float, float, float]:
    """Return the maximum R-hat, the minimum bulk and tail ESS, and the maximum error of a mean.

    Args:
      values: (chain, draw, entry), of at least four draws.

    Returns:
      Four numbers. The last is the maximum ratio of a Monte Carlo error to a standard deviation.
    """
    halves, tails = _split(values), []
    for level in (0.05, 0.95):
        below = values <= np.quantile(values, level, axis=(0, 1))
        tails.append(np.min(effective_sizes(_split(below.astype(np.float64)))))
    bulk = effective_sizes(_normal_scores(halves))
    errors = 1 / np.sqrt(effective_sizes(halves))
    return (
        float(np.max(r_hats(values)[0])),
        float(np.min(bulk)),
        float(min(tails)),
        float(np.max(errors)),
    )


def r_hats(values: np.ndarray, entries: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each entry, the larger of two rank-normalized split R-hats, and its limit.

    The two are the R-hat of the bulk and the R-hat of the scale.

    Args:
      values: (chain, draw, entry), of at least four draws.
      entries: The number of all entries, for the limit of `r_hat_limits`; None for no limits (infinity).
    """
    halves = _split(values)
    folded = np.abs(halves - np.median(halves, axis=(0, 1)))
    found, limits = [], []
    for scores in map(_normal_scores, (halves, folded)):
        found.append(_r_hat(scores))
        unlimited = np.full(values.shape[2], np.inf)
        limits.append(unlimited if entries is None else _limits(scores, entries))
    # NaN if all scores of an entry are equal, such as the scale of an entry with two values
    is_bulk = ~((found[1] > found[0]) | np.isnan(found[0]))
    return np.where(is_bulk, *found), np.where(is_bulk, *limits)


def effective_sizes(values: np.ndarray) -> np.ndarray:
    """Return the effective sample size of each entry's mean, by Geyer's monotone sequence.

    Args:
      values: (chain, draw, entry), of split chains.
    """
    chains, draws, _ = values.shape
    covariances = _autocovariances(values)
    within = covariances[0] * draws / (draws - 1)
    total = within * (draws - 1) / draws + (
        values.mean(axis=1).var(axis=0, ddof=1) if chains > 1 else 0
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = 1 - (within - covariances) / total
    rho[0] = 1.0
    return chains * draws / _times(rho, chains * draws)


def r_hat_limits(values: np.ndarray, entries: int) -> np.ndarray:
    r"""Return, for each entry, a limit that mixed chains' split R-hat seldom exceeds, (entry,).

    .. math::
      \hat R^2 \approx \frac{n - 1}{n} + \frac{\tau}{n} F_{m - 1,\; m (n / \tau - 1)}

    for m halves of n draws with the autocorrelation time :math:`\tau`, measured within halves. The means
    of the halves and the variances within the halves determine the degrees of freedom of F. With the
    quantile at :math:`0.95^{1 / k}`, all of k entries are below their limits in 95 of 100 runs. If
    halves have fewer than :math:`5 \tau` draws, the limit is infinite.

    Args:
      values: (chain, draw, entry), of at least four draws.
      entries: k, the number of all entries, of which `values` may contain only some.
    """
    return _limits(_split(values), entries)


def _limits(halves: np.ndarray, entries: int) -> np.ndarray:
    """Return the limits of `r_hat_limits`, given the halves of the chains."""
    import scipy.stats  # noqa: PLC0415 - loads as long as all of JAX

    m, n, _ = halves.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        covariances = _autocovariances(halves)
        rho = np.nan_to_num(covariances / covariances[0])
    tau = _times(rho, m * n)
    for _ in range(3):
        # Centering each half at its own mean reduces the autocovariance by tau / n of the variance
        share = np.minimum(tau / n, 0.9)
        tau = _times((1 - share) * rho + share, m * n)
    tau = np.maximum(tau, np.median(tau))
    within = m * np.maximum(n / tau - 1, 1 / m)
    quantile = scipy.stats.f.ppf(0.95 ** (1 / entries), m - 1, within)
    return np.where(5 * tau > n, np.inf, np.sqrt((n - 1 + quantile * tau) / n))


def _autocovariances(values: np.ndarray) -> np.ndarray:
    """Return the mean autocovariances of chains at each lag, (lag, entry)."""
    draws = values.shape[1]
    centered = values - values.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centered, 2 * draws, axis=1)
    found = np.fft.irfft(spectrum * np.conj(spectrum), 2 * draws, axis=1)[:, :draws] / draws
    return np.asarray(found.mean(axis=0))


def _times(rho: np.ndarray, size: int) -> np.ndarray:
    """Return autocorrelation times, by Geyer's monotone sequence."""
    # Keep the sums of pairs before the first nonpositive sum, and let no sum exceed an earlier sum
    pairs = rho[: len(rho) // 2 * 2].reshape(len(rho) // 2, 2, -1).sum(axis=1)
    positive = np.cumprod(pairs > 0, axis=0)
    pairs = np.minimum.accumulate(np.where(positive, pairs, 0.0), axis=0)
    return np.asarray(np.maximum(-1 + 2 * pairs.sum(axis=0), 1 / np.log10(max(size, 10))))


def split_r_hats(values: np.ndarray) -> np.ndarray:
    """Return the split R-hat of each entry without ranks; NaN for an entry that is equal in all draws.

    Args:
      values: (chain, draw, entry), of at least four draws.
    """
    return _r_hat(_split(values))


def _r_hat(halves: np.ndarray) -> np.ndarray:
    draws = halves.shape[1]
    within = halves.var(axis=1, ddof=1).mean(axis=0)
    between = halves.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt((draws - 1) / draws + between / within)


def _split(values: np.ndarray) -> np.ndarray:
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, -half:]])


def _normal_scores(values: np.ndarray) -> np.ndarray:
    import scipy.special  # noqa: PLC0415 - loads as long as all of JAX
    import scipy.stats  # noqa: PLC0415

    # Blom's offsets
    flat = values.reshape(-1, values.shape[2])
    ranks = scipy.stats.rankdata(flat, axis=0)
    scores = scipy.special.ndtri((ranks - 3 / 8) / (len(flat) + 1 / 4))
    return np.asarray(scores).reshape(values.shape)
