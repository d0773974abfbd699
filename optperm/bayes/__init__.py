"""Sampling a posterior: constant SGD, SGLD, IVON and SWAG.

This package contains constant SGD, Langevin dynamics, methods that learn a normal distribution (IVON,
SWAG), and diagnostics of draws. See ``examples/posterior.py``.
"""

from optperm.bayes._calibration import CalibrationReport as CalibrationReport
from optperm.bayes._calibration import calibration_report as calibration_report
from optperm.bayes._chains import Samples as Samples
from optperm.bayes._constant_sgd import ConstantSgdState as ConstantSgdState
from optperm.bayes._constant_sgd import constant_sgd as constant_sgd
from optperm.bayes._draw_samples import draw_samples as draw_samples
from optperm.bayes._gaussian_draws import posterior_mean as posterior_mean
from optperm.bayes._gaussian_draws import sample_params as sample_params
from optperm.bayes._ivon import IvonState as IvonState
from optperm.bayes._ivon import ivon as ivon
from optperm.bayes._kernel import NoiseKernel as NoiseKernel
from optperm.bayes._langevin import SghmcState as SghmcState
from optperm.bayes._langevin import SgldState as SgldState
from optperm.bayes._langevin import sghmc as sghmc
from optperm.bayes._langevin import sgld as sgld
from optperm.bayes._learn_kernel import learn_kernel as learn_kernel
from optperm.bayes._mandt_sgd import MandtSgdState as MandtSgdState
from optperm.bayes._mandt_sgd import mandt_sgd as mandt_sgd
from optperm.bayes._predictive import Ensemble as Ensemble
from optperm.bayes._predictive import Predictions as Predictions
from optperm.bayes._predictive import posterior_predictive as posterior_predictive
from optperm.bayes._prior import normal_prior as normal_prior
from optperm.bayes._remainders import RemainderState as RemainderState
from optperm.bayes._report import PosteriorReport as PosteriorReport
from optperm.bayes._report import posterior_report as posterior_report
from optperm.bayes._sample import sample as sample
from optperm.bayes._stationary import gaussian_kl as gaussian_kl
from optperm.bayes._stationary import stationary_covariance as stationary_covariance
from optperm.bayes._swag import SwagState as SwagState
from optperm.bayes._swag import swag as swag
from optperm.bayes._temperature import fit_temperature as fit_temperature
