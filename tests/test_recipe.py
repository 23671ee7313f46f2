"""What was done to a program, as a value and as the text that marks and reports have always held."""

from __future__ import annotations

import itertools

import pytest

from passes.recipe import Recipe, Scans

RECIPES = [
    Recipe(scans=scans, bodies=bodies, on_host=on_host, recompute=recompute)
    for scans, bodies, on_host, recompute in itertools.product(
        Scans, (False, True), (False, True), (None, "auto", "cut")
    )
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recipe_is_read_from_its_text(recipe: Recipe) -> None:
    assert Recipe.of_text(str(recipe)) == recipe


def test_the_texts_are_those_of_marks_in_old_caches() -> None:
    assert str(Recipe()) == "none"
    assert str(Recipe(recompute="auto")) == "auto"
    both = Recipe(scans=Scans.SEGMENTS, bodies=True, recompute="cut")
    assert str(both) == "scan segments+bodies+cut"
    assert len(set(map(str, RECIPES))) == len(RECIPES)
