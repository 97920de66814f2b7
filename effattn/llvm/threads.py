"""Handlers that XLA calls, whose tasks the threads of XLA's own pool share.

A job is an array of 64-bit slots: how far it has come, and what its tasks read. Whoever is free
takes the next task, the thread that XLA called among them, so that it ends even where no other
comes to help. The last to leave the job frees it.

What is read of XLA is its C interface for foreign functions, `xla/ffi/api/c_api.h`. Within a major
version structures only grow, at their ends.
"""

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

from effattn.llvm.code import BYTE, INT, INT32, NULL, POINTER, Code

VERSION = 0, 3  # of the interface, as it is in jaxlib 0.10.2

# Offsets in bytes. A structure begins with its size and its extensions, 8 bytes each.
_FRAME = {
    "extension": 8,
    "api": 16,
    "context": 24,
    "stage": 32,
    "arguments": 72,
    "results": 112,
    "attributes": 160,
}
_BUFFER = {"data": 24, "rank": 32, "sizes": 40}
_ATTRIBUTE = {"value": 8, "data": 16}  # of one number, and of an array
_EXTENSION = {"kind": 8, "metadata": 24}
_METADATA = {"major": 24, "minor": 28, "traits": 32}
_API = {"destroy error": 64, "schedule": 136, "count threads": 144}
_IS_METADATA, _IS_EXECUTION = 1, 3

_NEXT, _COUNT, _HOLDERS, _DONE, _FIRST = range(5)


class Job:
    """What a job's tasks read, by name: `job["scale"]`."""

    def __init__(self, code: Code, slots: Any, kinds: Mapping[str, Any]):
        self.code, self.slots, self.kinds = code, slots, kinds

    def __getitem__(self, name: str) -> Any:
        return self.code.load(self._place(name), kind=self.kinds[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self.code.store(value, self._place(name))

    def _place(self, name):
        return self.code.place(self.slots, _FIRST + list(self.kinds).index(name), INT)


class Frame:
    """What XLA calls a handler with."""

    def __init__(self, code: Code, pointer: Any):
        self.code, self.pointer = code, pointer

    def of(self, structure: Any, offset: int, kind: Any = POINTER) -> Any:
        """What lies so many bytes into a structure."""
        return self.code.load(self.code.place(structure, offset, BYTE), kind=kind)

    def own(self, name: str, number: int | None = None) -> Any:
        """One of its own entries, or number `number` of those that this one lists."""
        found = self.of(self.pointer, _FRAME[name])
        return found if number is None else self.code.load(found, number, POINTER)

    def data(self, name: str, number: int) -> Any:
        """The numbers of one of the "arguments" or "results"."""
        return self.of(self.own(name, number), _BUFFER["data"])

    def sizes(self, argument: int, count: int) -> list[Any]:
        """Of the last `count` axes of an argument, after the product of those before."""
        code, buffer = self.code, self.own("arguments", argument)
        leading = code.sub(self.of(buffer, _BUFFER["rank"], INT), count)
        sizes = self.of(buffer, _BUFFER["sizes"])
        product = code.variable(1)
        with code.loop(0, leading) as axis:
            code.set(product, code.mul(code.get(product), code.load(sizes, axis, INT)))
        last = (code.load(sizes, code.add(leading, axis), INT) for axis in range(count))
        return [code.get(product), *last]

    def integers(self, attribute: int, count: int) -> list[Any]:
        """The entries of an attribute that is an array of 64-bit integers."""
        data = self.of(self.own("attributes", attribute), _ATTRIBUTE["data"])
        return [self.code.load(data, number, INT) for number in range(count)]

    def number(self, attribute: int) -> Any:
        """An attribute that is one float32."""
        return self.code.load(self.of(self.own("attributes", attribute), _ATTRIBUTE["value"]))

    def threads(self) -> Any:
        """How many the pool has; one where there is no pool."""
        count = self.code.slots(1)
        well = self._went_well(self._call("count threads", self.own("context"), count))
        return self.code.builder.select(well, self.code.load(count, kind=INT), INT(1))

    def schedule(self, function: ir.Function, data: Any) -> Any:
        """Has a thread of the pool call the function of the data; whether one will."""
        return self._went_well(self._call("schedule", self.own("context"), function, data))

    def _call(self, name, *fields):
        """XLA's function of a structure with these fields; an error, or null."""
        code = self.code
        structure = code.slots(2 + len(fields))
        for number, field in enumerate((8 * (2 + len(fields)), 0, *fields)):
            code.store(field, code.place(structure, number, INT))
        kind = ir.FunctionType(POINTER, [POINTER])
        function = self.of(self.own("api"), _API[name], kind.as_pointer())
        return code.builder.call(function, [structure])

    def _went_well(self, error):
        failed = self.code.builder.icmp_unsigned("!=", error, NULL)
        with self.code.when(failed):
            self._call("destroy error", error)
        return self.code.builder.not_(failed)


def write_handler(
    module: ir.Module,
    name: str,
    lanes: int,
    kinds: Mapping[str, Any],
    begin: Callable[[Code, Frame, Job], tuple[Any, Any]],
    task: Callable[[Code, Job, Any, Any], None],
) -> None:
    """Writes the handler of that name.

    Args:
      module: that gets it.
      name: of the handler.
      lanes: of a vector.
      kinds: of what a job holds, by name.
      begin: writes what fills in the job from a frame; gives how many tasks there are, and how many
        numbers of memory each thread needs.
      task: writes what a task does, from its job, that memory, and its number.
    """
    kinds = {"bytes": INT, **kinds}
    do = Code(module, f"{name}_task", [POINTER, POINTER, INT], lanes)
    slots, memory, number = do.arguments
    task(do, Job(do, slots, kinds), memory, number)
    do.builder.ret_void()
    work = _write_work(module, name, lanes, kinds, do.function)
    help_with = _write_help(module, name, lanes, work)

    code = Code(module, name, [POINTER], lanes, POINTER)
    builder, frame = code.builder, Frame(code, code.arguments[0])
    _answer_which_version(code, frame)
    stage = frame.of(frame.pointer, _FRAME["stage"], INT32)
    with code.when(builder.icmp_signed("!=", stage, INT32(_IS_EXECUTION))):
        builder.ret(NULL)
    slots = code.call("malloc", 8 * (_FIRST + len(kinds)))
    job = Job(code, slots, kinds)
    count, numbers = begin(code, frame, job)
    job["bytes"] = code.mul(code.ceil(numbers, 16), 64)
    helpers = code.sub(code.max(code.min(frame.threads(), count), 1), 1)
    entries = {_NEXT: 0, _COUNT: count, _HOLDERS: code.add(helpers, 1), _DONE: 0}
    for slot, value in entries.items():
        code.store(value, code.place(slots, slot, INT))
    with code.loop(0, helpers):
        scheduled = frame.schedule(help_with, slots)
        with code.when(builder.not_(scheduled)):
            _leave(code, slots)
    code.call(work, slots)
    _wait(code, slots, count)
    _leave(code, slots)
    builder.ret(NULL)


def _answer_which_version(code, frame):
    """XLA asks a handler that it registers for which version of the interface it was made."""
    builder, extension = code.builder, frame.own("extension")
    with code.when(builder.icmp_unsigned("!=", extension, NULL)):
        kind = frame.of(extension, _EXTENSION["kind"], INT32)
        with code.when(builder.icmp_signed("==", kind, INT32(_IS_METADATA))):
            metadata = frame.of(extension, _EXTENSION["metadata"])
            for offset, value in zip(_METADATA.values(), (*VERSION, 0), strict=True):
                code.store(INT32(value), code.place(metadata, offset, BYTE))
            builder.ret(NULL)


def _write_work(module, name, lanes, kinds, task):
    """The function that does tasks of a job until none is left."""
    code = Code(module, f"{name}_work", [POINTER], lanes)
    (slots,), builder = code.arguments, code.builder
    memory = code.call("aligned_alloc", 64, Job(code, slots, kinds)["bytes"])
    count = code.load(slots, _COUNT, INT)
    head, body, after = (builder.append_basic_block(each) for each in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.atomic_rmw("add", code.place(slots, _NEXT, INT), INT(1), "monotonic")
    builder.cbranch(code.less(number, count), body, after)
    builder.position_at_end(body)
    code.call(task, slots, memory, number)
    builder.atomic_rmw("add", code.place(slots, _DONE, INT), INT(1), "release")
    builder.branch(head)
    builder.position_at_end(after)
    code.call("free", memory)
    builder.ret_void()
    return code.function


def _write_help(module, name, lanes, work):
    """What another thread of the pool runs."""
    code = Code(module, f"{name}_help", [POINTER], lanes)
    code.call(work, code.arguments[0])
    _leave(code, code.arguments[0])
    code.builder.ret_void()
    return code.function


def _wait(code, slots, count):
    """For tasks that other threads have begun."""
    builder = code.builder
    wait, done = (builder.append_basic_block(each) for each in ("wait", "done"))
    builder.branch(wait)
    builder.position_at_end(wait)
    finished = builder.load_atomic(code.place(slots, _DONE, INT), "acquire", 8, typ=INT)
    code.call("sched_yield")
    builder.cbranch(code.less(finished, count), wait, done)
    builder.position_at_end(done)


def _leave(code, slots):
    holders = code.builder.atomic_rmw("sub", code.place(slots, _HOLDERS, INT), INT(1), "acq_rel")
    with code.when(code.builder.icmp_signed("==", holders, INT(1))):
        code.call("free", slots)
