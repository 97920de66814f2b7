"""Fixtures for the subjects of the battery, and the order in which the laws test the subjects."""

import gc

from effattn import registry
from tests.laws.battery import IN_FLOAT32, SUBJECTS
from tests.laws.seconds import name_of


def pytest_generate_tests(metafunc):
    for fixture, subjects in (("mechanism", IN_FLOAT32), ("subject", SUBJECTS)):
        if fixture in metafunc.fixturenames and not _is_parametrized(metafunc, fixture):
            metafunc.parametrize(fixture, subjects, ids=str)


def _is_parametrized(metafunc, fixture):
    marks = metafunc.definition.iter_markers("parametrize")
    return any(fixture in mark.args[0] for mark in marks)


def pytest_collection_modifyitems(items):
    """Puts the laws of one mechanism together, so that a worker reuses the compiled programs."""
    # Tracing makes many objects and little garbage; the search for reference cycles would take an
    # eighth of the whole time.
    gc.freeze()
    gc.set_threshold(100_000)
    order = {name: place for place, name in enumerate(registry.names())}
    places = [place for place, item in enumerate(items) if name_of(item) is not None]
    laws = sorted((items[place] for place in places), key=lambda item: order[name_of(item)])
    for place, item in zip(places, laws, strict=True):
        items[place] = item
