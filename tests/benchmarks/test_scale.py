"""The parts of `benchmarks/scale.py` that are written there: SCALE, GaLore for stacks, and its rates."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import scale

pytestmark = pytest.mark.usefixtures("lenient")
ROWS = "a title", ["method", "rate", "decay", "bytes per param"]


def write_rows(path, *rows):
    table = {"title": ROWS[0], "columns": ROWS[1], "rows": [[*row, "1"] for row in rows]}
    path.write_text(json.dumps({"tables": [table]}))
    return path


def make_params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "embed": {"embedding": jax.random.normal(keys[0], (8, 4))},
        "layers": {
            "norm": {"scale": jnp.ones((3, 4))},
            "up": {"kernel": jax.random.normal(keys[1], (3, 4, 8))},
        },
        "norm": {"scale": jax.random.normal(keys[2], (4,))},
        "head": {"kernel": jax.random.normal(keys[3], (4, 8))},
    }


def test_scale_moves_by_normalized_columns_with_momentum_in_the_last_layer_alone():
    params = make_params()
    tx = scale.scale(params, 0.5, 0.1)
    state, momentum = tx.init(params), np.zeros((4, 8))
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.cos(p + step), params)
        updates, state = tx.update(grads, state, params)
        g = jax.tree.map(np.float64, grads)
        momentum = 0.9 * momentum + 0.1 * g["head"]["kernel"]
        for names, raw in {
            ("embed", "embedding"): g["embed"]["embedding"],
            ("layers", "up"): g["layers"]["up"]["kernel"],
            ("head", "kernel"): momentum,
        }.items():
            wanted = raw / np.sqrt(np.mean(raw**2, axis=-2, keepdims=True))
            found, p = (tree[names[0]][names[1]] for tree in (updates, params))
            found, p = (jax.tree.leaves(x)[0] for x in (found, p))
            np.testing.assert_allclose(found, -0.5 * (wanted + 0.1 * p), rtol=2e-5, atol=1e-6)
    # Of the other leaves, norms alone have moments.
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sorted(sizes) == [4, 4, 12, 12, 32]


def test_galore_of_a_stack_is_that_of_its_layers():
    params = make_params()
    alone = {"scale": params["norm"]["scale"]} | {
        str(index): layer for index, layer in enumerate(params["layers"]["up"]["kernel"])
    }
    numbers = {name: optax.contrib.GaLoreDimensionNumbers() for name in alone} | {"scale": None}
    stacked = scale.galore(params, 0.1, 0.1)
    layers = optax.contrib.galore(
        0.1, 1, scale.EVERY, weight_decay=0.1, weight_dimension_numbers=numbers
    )
    grads = jax.tree.map(jnp.cos, params)
    found, _ = stacked.update(grads, stacked.init(params), params)
    wanted, _ = layers.update(jax.tree.map(jnp.cos, alone), layers.init(alone), alone)
    for index, layer in enumerate(found["layers"]["up"]["kernel"]):
        np.testing.assert_allclose(layer, wanted[str(index)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["norm"]["scale"], wanted["scale"], rtol=1e-6)


def test_rates_of_two_sizes_lead_to_the_next_by_their_ratio(tmp_path):
    small = write_rows(tmp_path / "1.json", ("AdamW", "0.003", "0.1"), ("Muon", "0.01", "0"))
    large = write_rows(tmp_path / "10.json", ("AdamW", "0.001", "0"))
    assert scale.tuned_point([small], "Muon") == (0.01, 0.0)
    assert scale.tuned_point([small, large], "AdamW") == (0.00033, 0.0)
    with pytest.raises(SystemExit, match=r"10\.json has no row of 'Muon'"):
        scale.tuned_point([small, large], "Muon")


def test_a_grid_goes_on_until_its_best_rate_is_inside():
    losses = {0.001: 3.0, 0.003: 2.0, 0.01: 1.5, 0.033: 1.2, 0.11: 1.4}
    runs = scale.Runs.__new__(scale.Runs)
    tried = []

    def get(name, rate, decay, seed):
        tried.append((rate, decay))
        return {"nats to choose": str(losses[rate] + decay)}

    runs.get = get
    assert runs.best("AdamW", [0.001, 0.003, 0.01], [0.1, 0.0]) == (0.033, 0.0)
    assert (0.11, 0.0) in tried
    assert (0.033, 0.1) not in tried


def test_the_text_depends_only_on_the_names_of_files(tmp_path, monkeypatch, capsys):
    for name in ("b.py", "deep/a.py", "c.txt"):
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 10)
    monkeypatch.setattr(
        scale.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path / "packages")}
    )
    scale.main(["--make", str(tmp_path / "text"), "--megabytes", "1.5e-4"])
    text = (tmp_path / "text").read_text()
    assert len(text) == 150
    assert {line for line in text.splitlines() if line.endswith(".py")} == {"# b.py", "# deep/a.py"}
    assert "2 files, 150 bytes" in capsys.readouterr().out


def test_what_is_missing_is_said_with_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"nowhere is not there: .* --make FILE"):
        scale.main(["--size", "0", "--text", str(tmp_path / "nowhere"), "--methods", "AdamW"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install flashoptim-jax"):
        scale.main(["--size", "0", "--methods", scale.FLASH])
