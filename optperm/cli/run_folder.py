"""The folder of a run: its files, and the network rebuilt from them.

- `metrics.jsonl`: one line per epoch (`training.Training`), written during training;
- `summary.json`: the result, every flag and hyperparameter, versions;
- `steps.npz`: loss and accuracy of each step, and the fraction of moved weights if it is counted;
- `curve.png`: loss, accuracy and fraction moved over the steps;
- `checkpoints/` on request: the checkpoints of `optperm.training.fit`, named by their steps; its
  `run.json` lists the values that must be the same in a run that resumes from them;
- `permutation.npz` if the method permutes weights, otherwise `params.npz`: the trained network.

The network's file contains its spec (`models.NetworkSpec`), a digest of its trained weights, and for
each parameter "params/<path>" its values or its permutation (`optperm.permutation.export_permutation`).
With a permutation, the file needs no initial params, because they are drawn again from the seed.
"""

import dataclasses
import itertools
import json
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import optperm
from optperm.cli import models
from optperm.cli.errors import CliError, UsageError
from optperm.core.shapes import Params
from optperm.core.states import find_running_states
from optperm.permutation._export import PERMUTED_STATES
from optperm.training import CheckpointError
from optperm.training._checkpoints import describe_differences
from optperm.training._processes import digest

METRICS_FILE, CHECKPOINTS, _IDENTITY_FILE = "metrics.jsonl", "checkpoints", "checkpoints/run.json"
# Errors in reading a damaged file or a file of another program.
_DAMAGE = (ValueError, TypeError, KeyError, EOFError, MemoryError)
_PERMUTATION_FILE, _PARAMS_FILE = "permutation.npz", "params.npz"


def create(out: str | None, name: str) -> pathlib.Path:
    """Make the folder of a run: `out`, which must be new or empty, or else a new `runs/<name>`."""
    try:
        if out is not None:
            folder = pathlib.Path(out)
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise UsageError(
                    f"--out {out} exists and is not an empty folder: name another folder."
                )
            folder.mkdir(parents=True, exist_ok=True)
        else:
            stem = f"runs/{name.replace(':', '.')}"  # the name of a user's module has a colon
            names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
            folder = next(filter(_is_made, map(pathlib.Path, names)))
        (folder / METRICS_FILE).touch()
    except OSError as error:
        raise CliError(f"cannot write to {error.filename}: {error.strerror}.") from error
    return folder


def _is_made(path: pathlib.Path) -> bool:
    """Make a folder; return False if it exists, even if another run has made it just now."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def find_checkpoint(folder: pathlib.Path, identity: Mapping[str, Any]) -> int:
    """Return the step of the newest checkpoint of a run folder, if this run can resume from it."""
    kept = _list_steps(folder)
    if not kept:
        raise CliError(
            f"--resume {folder} contains no checkpoints of a run with --checkpoint-every."
        )
    if which := describe_differences(read_json(folder / _IDENTITY_FILE), identity):
        raise UsageError(f"--resume {folder} belongs to another run: {which}.")
    return kept[-1]


def _list_steps(folder: pathlib.Path) -> list[int]:
    """Return the steps of the checkpoints of a run folder, in order."""
    return sorted(int(p.name) for p in folder.glob(f"{CHECKPOINTS}/*") if p.name.isdecimal())


def begin_checkpoints(
    folder: pathlib.Path, identity: Mapping[str, Any], resumed: pathlib.Path | None, step: int
) -> None:
    """Write the identity of a run, and copy the checkpoint from which it resumes."""
    write_json(folder / _IDENTITY_FILE, identity)
    if resumed is not None:
        at = pathlib.Path(CHECKPOINTS, str(step))
        shutil.copytree(resumed / at, folder / at)


def give_up(resumed: pathlib.Path, folder: pathlib.Path, error: CliError) -> CliError:
    """Remove the folder of a run that could not begin; return the error for the resumed folder."""
    shutil.rmtree(folder)
    says = str(error).replace(str(folder.absolute()), str(resumed))
    cause = error.__cause__
    if isinstance(cause, CheckpointError) and cause.unread is not None:
        others = [step for step in _list_steps(resumed) if step != cause.unread]
        says += f" Delete it to resume from the checkpoint of step {others[-1]}." if others else ""
    return type(error)(says)


def append_metrics(folder: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Add a line to metrics.jsonl."""
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(_json(record) + "\n")


def read_metrics(folder: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl up to a step."""
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    # A killed run may have written only a part of its last line.
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["step"] <= step]


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Write a readable file, such as summary.json."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(_json(values, indent=2) + "\n", encoding="utf-8")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a file from `write_json`."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, *_DAMAGE) as error:
        raise CliError(f"{path} is damaged or was not written by optperm ({error}).") from error


def _json(values: Mapping[str, Any], **options: Any) -> str:
    # JSON has neither NaN nor infinity, so a loss that diverged becomes null.
    text = json.dumps(values, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), **options)


def write_network(
    folder: pathlib.Path, spec: models.NetworkSpec, trained: Params, opt_state: Any
) -> None:
    """Write the trained params, or their permutation if the method permutes them."""
    name, leaves = _PARAMS_FILE, trained
    if find_running_states(opt_state, PERMUTED_STATES):
        # This integer program needs no optimized machine code. Because it is traced, it checks nothing.
        options = {"xla_backend_optimization_level": 0}
        export = jax.jit(optperm.permutation.export_permutation, compiler_options=options)
        name, initial = _PERMUTATION_FILE, models.initial_params(spec)
        leaves = jax.device_get(export(initial, opt_state, trained))
        permuted = jax.tree.map(
            lambda x, at: np.ravel(x)[np.ravel(at)].reshape(x.shape), initial, leaves
        )
        if digest(permuted) != digest(trained):
            raise CliError("the permutation does not give the trained weights: please report this.")
    arrays: dict[str, Any] = flatten_dict({"params": jax.device_get(leaves)}, sep="/")
    np.savez_compressed(folder / name, digest=digest(trained), **dataclasses.asdict(spec), **arrays)


def rebuild(folder: pathlib.Path) -> tuple[models.NetworkSpec, Params]:
    """Rebuild the trained network of a run bit for bit, only from permutation.npz or params.npz."""
    paths = [folder / name for name in (_PERMUTATION_FILE, _PARAMS_FILE)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise CliError(f"{folder} contains no trained network from `optperm train`.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        fields = {
            field.name: arrays[field.name].tolist()
            for field in dataclasses.fields(models.NetworkSpec)
        }
        spec = models.NetworkSpec(**fields | {"input_shape": tuple(fields["input_shape"])})
        params = unflatten_dict(arrays, sep="/")["params"]
        if path.name == _PERMUTATION_FILE:
            params = optperm.permutation.apply_permutation(models.initial_params(spec), params)
        is_same = digest(params) == str(arrays["digest"])
    except (*_DAMAGE, zipfile.BadZipFile, zlib.error) as error:
        raise CliError(f"{path} is damaged or was not written by optperm ({error}).") from error
    if not is_same:
        says = f"{path} gives other weights here: it is damaged, or versions or devices differ"
        raise CliError(f"{says} from those in summary.json.")
    return spec, params
