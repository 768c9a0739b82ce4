"""The pictures of the README: drawn from the stored results, for light and dark pages, and described."""

from __future__ import annotations

import pytest

from _results import RESULTS
from _tables import Regions
from make_pictures import ASSETS, DARK, PICTURES, descriptions, main, picture


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_the_stored_results_and_says_what_it_shows(name):
    regions = Regions(RESULTS)
    stored = (ASSETS / f"{name}.svg").read_text(encoding="utf-8")
    text = descriptions(regions)[name]
    assert len(text) > 100 and text in stored and text in picture(name, regions), "run scripts/make_pictures.py"


def test_pictures_follow_the_page_into_the_dark(tmp_path):
    main(tmp_path)
    assert {file.stem for file in tmp_path.iterdir()} == set(PICTURES)
    for file in tmp_path.iterdir():
        text = file.read_text(encoding="utf-8")
        light, dark = text.split("@media(prefers-color-scheme:dark)")
        assert all(f"--c0:{next(iter(DARK))};" in part for part in [light]) and DARK["#ffffff"] in dark
        assert "fill: var(--c" in text and "http://" not in text.partition("<defs>")[2]
