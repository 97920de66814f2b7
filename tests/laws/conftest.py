"""The battery's subjects as fixtures, and the order in which they are tested."""

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
    """All of one mechanism together, so that a worker that compiles a program uses it again."""
    # Tracing makes many objects and little garbage: searching it for cycles is an eighth of it all.
    gc.freeze()
    gc.set_threshold(100_000)
    order = {name: place for place, name in enumerate(registry.names())}
    places = [place for place, item in enumerate(items) if name_of(item) is not None]
    laws = sorted((items[place] for place in places), key=lambda item: order[name_of(item)])
    for place, item in zip(places, laws, strict=True):
        items[place] = item
