"""The mechanisms that laws test, and the order in which they test them."""

import gc

from effattn import registry
from tests.laws.battery import MECHANISMS
from tests.laws.seconds import name_of


def pytest_generate_tests(metafunc):
    marks = metafunc.definition.iter_markers("parametrize")
    if "mechanism" in metafunc.fixturenames and not any("mechanism" in m.args[0] for m in marks):
        metafunc.parametrize("mechanism", MECHANISMS, ids=str)


def pytest_collection_modifyitems(items):
    """Puts the laws of one mechanism together, so that a worker reuses the compiled programs."""
    # Tracing makes many objects and little garbage; the search for reference cycles would take an
    # eighth of the whole time.
    gc.freeze()
    gc.set_threshold(100_000)
    order = {name: place for place, name in enumerate(registry.names())}
    places = [place for place, item in enumerate(items) if name_of(item) is not None]

    def place_of(item):
        # These tests clear the programs that are known, so they come after all others.
        return item.path.stem == "test_independence", order[name_of(item)]

    laws = sorted((items[place] for place in places), key=place_of)
    for place, item in zip(places, laws, strict=True):
        items[place] = item
