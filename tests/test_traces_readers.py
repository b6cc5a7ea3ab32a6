"""Every format has a reader, an entry in the documents, and takes what a user states."""

from importlib import import_module
from pathlib import Path

import pytest

from kvfold.traces.readers import _READERS, FORMATS, SEVERAL, Stated

REPO = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_a_reader_and_a_line_in_the_documents(format):
    module, name = _READERS[format]
    assert callable(getattr(import_module(f"kvfold.traces.{module}"), name))
    assert f"\n| `{format}` |" in (REPO / "docs/traces.md").read_text()


def test_formats_of_many_files_are_named_in_the_documents():
    text = (REPO / "docs/traces.md").read_text().split("take a folder or an archive of many files")[0]
    assert all(f"`{format}`" in text.splitlines()[-2] + text.splitlines()[-1] for format in SEVERAL)


def test_a_map_of_columns_implies_its_format():
    assert (Stated().format, Stated(columns="a=b").format) == (None, "columns")
