"""The folder of compiled programs that the workers of a test run, and the programs they start, share."""

import importlib.metadata
import pathlib
import tempfile

JAX_VERSION = importlib.metadata.version("jax")
DEFAULT = pathlib.Path(__file__).parents[1] / ".pytest_cache" / f"programs-jax-{JAX_VERSION}"


def choose(folder=None):
    """Choose the folder, which is kept for the next run, or a temporary one where it cannot be used.

    Args:
      folder: The folder that the user names, if any; else one in the checkout, which git ignores.

    Returns:
      The folder, and why it is a temporary one (None if it is not).
    """
    # Tests and the programs that they start run in other folders too.
    folder = pathlib.Path(folder or DEFAULT).expanduser().absolute()
    stamp = folder / "jax-version.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            stamp.write_text(JAX_VERSION, encoding="utf-8")
        found = stamp.read_text(encoding="utf-8").strip()
        if found == JAX_VERSION:
            tempfile.TemporaryFile(dir=folder).close()  # raises where nothing can be written
            return folder, None
        reason = f"holds programs of jax {found}, and this is jax {JAX_VERSION}"
    except (FileNotFoundError, UnicodeDecodeError):
        holds = "holds other files than compiled programs"
        reason = holds if folder.exists() else "cannot be made"
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
    return pathlib.Path(tempfile.mkdtemp()), f"{folder} {reason}"
