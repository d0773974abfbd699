"""The pages of the documentation."""

import inspect
import pathlib
import re
from collections import Counter

import optperm
from optperm import training

PAGES = pathlib.Path(__file__).parents[1] / "docs" / "api"


def test_every_public_name_stands_on_one_page():
    """What is added to the library has to be added to a page."""
    public = Counter()
    for package in (optperm, training):
        exported = re.findall(r" as (\w+)$", inspect.getsource(package), re.MULTILINE)
        public.update(name for name in exported if not inspect.ismodule(getattr(package, name)))
    listed = Counter()
    for page in PAGES.glob("*.rst"):
        listed.update(re.findall(r"^\.\. auto\w+:: (\w+)$", page.read_text(), re.MULTILINE))
    assert listed == public
