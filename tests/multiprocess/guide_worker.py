"""A host of the guide on slow links: `guide_worker.py ADDRESS PROCESSES INDEX SCRIPT`.

The script runs in its own folder. It is a user's program, so it runs with the settings of users.
"""

import os
import pathlib
import runpy
import sys

import jax

if __name__ == "__main__":
    script = pathlib.Path(sys.argv.pop())
    os.chdir(script.parent)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(script), run_name="__main__")
