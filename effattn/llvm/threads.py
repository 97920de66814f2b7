"""Handlers that XLA calls, whose tasks the threads of XLA's own pool share.

A job is an array of 64-bit slots: how far it has come, and what its tasks read. Whoever is free
takes the next task, the thread that XLA called among them, so that it ends even where no other
comes to help. The last to leave the job frees it.

The thread that XLA called gets its memory before it asks others to help, and returns an error where
there is none. A helper that gets none takes no task.
"""

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

from effattn.llvm.code import INT, INT32, NULL, POINTER, Code
from effattn.llvm.frame import Frame
from effattn.llvm.interface import FRAME, IS_EXECUTION, RESOURCE_EXHAUSTED, Signature

_NEXT, _COUNT, _HOLDERS, _DONE, _FIRST = range(5)


class Job:
    """The values that a job's tasks read, by name: `job["scale"]`."""

    def __init__(self, code: Code, slots: Any, kinds: Mapping[str, Any]):
        self.code, self.slots, self.kinds = code, slots, kinds

    def __getitem__(self, name: str) -> Any:
        return self.code.load(self._place(name), kind=self.kinds[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self.code.store(value, self._place(name))

    def _place(self, name):
        return self.code.place(self.slots, _FIRST + list(self.kinds).index(name), INT)

    def example_of(self, argument: str, example: Any) -> Any:
        """The example that an argument has for `example` of the first result.

        Batch axes of length 1 have one entry for all.
        """
        code, builder = self.code, self.code.builder
        found, stride, rest = code.variable(0), code.variable(1), code.variable(example)
        with code.loop(0, self["batch_axes"]) as n:
            axis = code.sub(code.sub(self["batch_axes"], 1), n)
            own = code.load(self[_sizes_of(argument)], axis, INT)
            length = code.load(self["batch_sizes"], axis, INT)
            place = code.rem(code.get(rest), length)
            place = builder.select(code.less(1, own), place, INT(0))
            code.set(found, code.add(code.get(found), code.mul(place, code.get(stride))))
            code.set(stride, code.mul(code.get(stride), own))
            code.set(rest, code.div(code.get(rest), length))
        return code.get(found)


def _sizes_of(argument):
    return f"sizes of {argument}"


def write_handler(
    module: ir.Module,
    name: str,
    lanes: int,
    signature: Signature,
    kinds: Mapping[str, Any],
    begin: Callable[[Code, Frame, Job], tuple[Any, Any]],
    task: Callable[[Code, Job, Any, Any], None],
) -> None:
    """Writes the handler of that name.

    Args:
      module: gets the handler.
      name: of the handler.
      lanes: of a vector.
      signature: of the handler. A job has its arrays by name, and as "batch" the number of examples
        of the first result.
      kinds: of the other values that a job holds, by name.
      begin: writes the code that fills in these values from a frame; returns the number of tasks,
        and how many float32 numbers of memory each thread needs.
      task: writes the code of a task, from its job, that memory, and its number.
    """
    arrays = *signature.arguments, *signature.results
    kinds = {
        "bytes": INT,
        "batch": INT,
        "batch_axes": INT,
        "batch_sizes": POINTER,
        **{array.name: POINTER for array in arrays},
        **{_sizes_of(array.name): POINTER for array in signature.arguments},
        **kinds,
    }
    do = Code(module, f"{name}_task", [POINTER, POINTER, INT], lanes)
    slots, memory, number = do.arguments
    task(do, Job(do, slots, kinds), memory, number)
    do.builder.ret_void()
    work = _write_work(module, name, lanes, do.function)
    help_with = _write_help(module, name, lanes, kinds, work)

    code = Code(module, name, [POINTER], lanes, POINTER)
    builder, frame = code.builder, Frame(code, code.arguments[0])
    frame.answer_version()
    stage = frame.of(frame.pointer, FRAME["stage"], INT32)
    with code.when(builder.icmp_signed("!=", stage, INT32(IS_EXECUTION))):
        builder.ret(NULL)
    frame.check(name, signature)
    slots = code.call("malloc", 8 * (_FIRST + len(kinds)))
    _refuse_without(code, frame, name, slots)
    job = Job(code, slots, kinds)
    _read_arrays(code, frame, job, signature)
    count, numbers = begin(code, frame, job)
    job["bytes"] = code.mul(code.ceil(numbers, 16), 64)
    memory = code.call("aligned_alloc", 64, job["bytes"])
    _refuse_without(code, frame, name, memory, slots)
    helpers = code.sub(code.max(code.min(frame.threads(), count), 1), 1)
    entries = {_NEXT: 0, _COUNT: count, _HOLDERS: code.add(helpers, 1), _DONE: 0}
    for slot, value in entries.items():
        code.store(value, code.place(slots, slot, INT))
    with code.loop(0, helpers):
        scheduled = frame.schedule(help_with, slots)
        with code.when(builder.not_(scheduled)):
            _leave(code, slots)
    code.call(work, slots, memory)
    code.call("free", memory)
    _wait(code, slots, count)
    _leave(code, slots)
    builder.ret(NULL)


def _refuse_without(code, frame, name, memory, *others):
    """Returns an error where no memory was got, and frees what was got before."""
    with code.when(code.builder.icmp_unsigned("==", memory, NULL)):
        for other in others:
            code.call("free", other)
        frame.refuse(RESOURCE_EXHAUSTED, f"{name}: out of memory")


def _read_arrays(code, frame, job, signature):
    """Fills in where the arrays lie, and how long the batch axes are."""
    job["batch_axes"] = code.sub(frame.rank("results", 0), signature.results[0].axes)
    job["batch_sizes"] = frame.sizes("results", 0)
    batch = code.variable(1)
    with code.loop(0, job["batch_axes"]) as axis:
        code.set(batch, code.mul(code.get(batch), code.load(job["batch_sizes"], axis, INT)))
    job["batch"] = code.get(batch)
    for kind in ("arguments", "results"):
        for number, array in enumerate(getattr(signature, kind)):
            job[array.name] = frame.data(kind, number)
            if kind == "arguments":
                job[_sizes_of(array.name)] = frame.sizes(kind, number)


def _write_work(module, name, lanes, task):
    """The function that does tasks of a job, in the memory given, until none is left."""
    code = Code(module, f"{name}_work", [POINTER, POINTER], lanes)
    (slots, memory), builder = code.arguments, code.builder
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
    builder.ret_void()
    return code.function


def _write_help(module, name, lanes, kinds, work):
    """The function that another thread of the pool runs."""
    code = Code(module, f"{name}_help", [POINTER], lanes)
    (slots,) = code.arguments
    memory = code.call("aligned_alloc", 64, Job(code, slots, kinds)["bytes"])
    with code.when(code.builder.icmp_unsigned("!=", memory, NULL)):
        code.call(work, slots, memory)
        code.call("free", memory)
    _leave(code, slots)
    code.builder.ret_void()
    return code.function


def _wait(code, slots, count):
    """Waits for tasks that other threads have begun."""
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
