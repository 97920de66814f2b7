"""Generator of XLA FFI handlers, whose tasks run on the threads of XLA's own pool.

`Frame` generates the code that reads and checks the call frame, the structure that XLA passes to a
handler. `write_handler` generates the handler, which divides its work into tasks.

A job is an array of 64-bit slots: progress counters, and the values that the tasks read. Each free
thread takes the next task. The thread that XLA called takes tasks as well, so the job finishes even
if no other thread helps. The last thread to finish with the job frees it.

The thread that XLA called allocates its scratch memory before it schedules helpers, and returns an
error if the allocation fails. A helper whose allocation fails takes no task.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from effattn.llvm.codegen import BYTE, FLOAT, INT, INT32, NULL, POINTER, Code
from effattn.llvm.runtime import (
    API,
    ARRAY,
    BUFFER,
    DTYPE_CODES,
    EXTENSION,
    FAILED_PRECONDITION,
    FRAME,
    INVALID_ARGUMENT,
    IS_ARRAY,
    IS_EXECUTION,
    IS_METADATA,
    IS_SCALAR,
    METADATA,
    RESOURCE_EXHAUSTED,
    SCALAR,
    SIZES,
    VERSION,
    Signature,
)


class Frame:
    """Generates code that reads and checks a call frame, and returns XLA errors."""

    def __init__(self, code: Code, pointer: Any):
        self.code, self.pointer = code, pointer

    def field(self, structure: Any, offset: int, kind: Any = POINTER) -> Any:
        """Loads the field at a byte offset of a structure."""
        return self.code.load(self.code.address(structure, offset, BYTE), kind=kind)

    def frame_field(self, name: str, number: int | None = None) -> Any:
        """Loads a field of the frame, or element `number` of the list in that field."""
        found = self.field(self.pointer, FRAME[name])
        return found if number is None else self.code.load(found, number, POINTER)

    def data(self, kind: str, number: int) -> Any:
        """Address of the data of a buffer; `kind` is "arguments" or "results"."""
        return self.field(self.frame_field(kind, number), BUFFER["data"])

    def sizes(self, kind: str, number: int) -> Any:
        """Address of the shape of an argument or result, an array of 64-bit integers."""
        return self.field(self.frame_field(kind, number), BUFFER["sizes"])

    def rank(self, kind: str, number: int) -> Any:
        """Rank of an argument or result."""
        return self.field(self.frame_field(kind, number), BUFFER["rank"], INT)

    def last_sizes(self, argument: int, count: int) -> list[Any]:
        """Lengths of the last `count` axes of an argument."""
        first = self.code.sub(self.rank("arguments", argument), count)
        sizes = self.sizes("arguments", argument)
        return [self.code.load(sizes, self.code.add(first, axis), INT) for axis in range(count)]

    def integers(self, count: int) -> list[Any]:
        """Elements of the attribute `limits`."""
        data = self.field(self.frame_field("attributes", 0), ARRAY["data"])
        return [self.code.load(data, number, INT) for number in range(count)]

    def scale(self) -> Any:
        """Attribute `scale`."""
        return self.code.load(self.field(self.frame_field("attributes", 1), SCALAR["value"]))

    def threads(self) -> Any:
        """Number of threads in XLA's pool; 1 if there is no pool."""
        count = self.code.slots(1)
        well = self._succeeded(self._call("count threads", self.frame_field("context"), count))
        return self.code.builder.select(well, self.code.load(count, kind=INT), INT(1))

    def schedule(self, function: ir.Function, data: Any) -> Any:
        """Schedules the call `function(data)` on the pool; returns whether it was scheduled."""
        return self._succeeded(self._call("schedule", self.frame_field("context"), function, data))

    # Errors

    def answer_version(self) -> None:
        """Answers XLA's request for the interface version, made when a handler is registered."""
        code, builder, extension = self.code, self.code.builder, self.frame_field("extension")
        with code.when(builder.icmp_unsigned("!=", extension, NULL)):
            kind = self.field(extension, EXTENSION["kind"], INT32)
            with code.when(builder.icmp_signed("==", kind, INT32(IS_METADATA))):
                metadata = self.field(extension, EXTENSION["metadata"])
                for offset, value in zip(METADATA.values(), (*VERSION, 0), strict=True):
                    code.store(INT32(value), code.address(metadata, offset, BYTE))
                builder.ret(NULL)

    def check(self, name: str, signature: Signature) -> None:
        """Returns an error if version, structures, attributes or buffers are unexpected."""
        unlike = self.code.builder.icmp_signed
        api = self.frame_field("api")
        major = self.field(api, API["major"], INT32)
        minor = self.field(api, API["minor"], INT32)
        version = f"{name}: needs another XLA FFI than jaxlib has; use implementation='xla'"
        for wrong in (
            self.code.less(self.field(self.pointer, 0, INT), SIZES["frame"]),
            self.code.less(self.field(api, 0, INT), SIZES["api"]),
            unlike("!=", major, INT32(VERSION[0])),
            unlike("<", minor, INT32(VERSION[1])),
        ):
            self._refuse_if(wrong, FAILED_PRECONDITION, version)
        self._check_attributes(name, signature.integers)
        for kind in ("argument", "result"):
            arrays = getattr(signature, f"{kind}s")
            count = self.field(self.pointer, FRAME[f"{kind} count"], INT)
            wrong = unlike("!=", count, INT(len(arrays)))
            self._refuse_if(wrong, INVALID_ARGUMENT, f"{name}: needs {len(arrays)} {kind}s")
        batch = self.code.sub(self.rank("results", 0), signature.results[0].axes)
        self._refuse_if(
            self.code.less(batch, 0), INVALID_ARGUMENT, f"{name}: the first result has too few axes"
        )
        for kind in ("arguments", "results"):
            for number, array in enumerate(getattr(signature, kind)):
                buffer, wanted = self.frame_field(kind, number), INT32(DTYPE_CODES[array.dtype])
                needs = f"{name}: {array.name} must be {array.dtype}"
                dtype = self.field(buffer, BUFFER["dtype"], INT32)
                rank = self.code.add(batch, array.axes)
                for wrong, message in (
                    (self.code.less(self.field(buffer, 0, INT), SIZES["buffer"]), version),
                    (unlike("!=", dtype, wanted), needs),
                    (
                        unlike("!=", self.rank(kind, number), rank),
                        f"{needs} with {array.axes} axes beside the batch axes",
                    ),
                ):
                    self._refuse_if(wrong, INVALID_ARGUMENT, message)

    def refuse(self, status: int, message: str) -> None:
        """Returns an XLA error with a status and a message."""
        text = self.code.text(message)
        self.code.builder.ret(self._call("create error", text, status))

    def _refuse_if(self, wrong, status, message):
        with self.code.when(wrong):
            self.refuse(status, message)

    def _check_attributes(self, name, integers):
        unlike = self.code.builder.icmp_signed
        kinds = [IS_ARRAY, IS_SCALAR] if integers else []
        message = f"{name}: needs the attributes limits, {integers} int64, and scale, float32"
        count = self.field(self.pointer, FRAME["attribute count"], INT)
        self._refuse_if(unlike("!=", count, INT(len(kinds))), INVALID_ARGUMENT, message)
        for number, kind in enumerate(kinds):
            found = self.code.load(self.frame_field("attribute types"), number, INT32)
            self._refuse_if(unlike("!=", found, INT32(kind)), INVALID_ARGUMENT, message)
            dtype = self.field(self.frame_field("attributes", number), 0, INT32)
            wanted = DTYPE_CODES["int64" if kind == IS_ARRAY else "float32"]
            self._refuse_if(unlike("!=", dtype, INT32(wanted)), INVALID_ARGUMENT, message)
        if integers:
            size = self.field(self.frame_field("attributes", 0), ARRAY["size"], INT)
            self._refuse_if(unlike("!=", size, INT(integers)), INVALID_ARGUMENT, message)

    def _call(self, name, *fields):
        """Calls a function of XLA's API with a structure of these fields; an error, or null."""
        code = self.code
        structure = code.slots(2 + len(fields))
        for number, field in enumerate((8 * (2 + len(fields)), 0, *fields)):
            code.store(field, code.address(structure, number, INT))
        kind = ir.FunctionType(POINTER, [POINTER])
        function = self.field(self.frame_field("api"), API[name], kind.as_pointer())
        return code.builder.call(function, [structure])

    def _succeeded(self, error):
        failed = self.code.builder.icmp_unsigned("!=", error, NULL)
        with self.code.when(failed):
            self._call("destroy error", error)
        return self.code.builder.not_(failed)


# Slots of a job: the next task, the number of tasks, the threads that hold the job, the finished
# tasks, the memory that threads share or null, and the first of the values.
_NEXT, _COUNT, _HOLDERS, _DONE, _SHARED, _FIRST = range(6)


class Job:
    """Values that the tasks of a job read, by name: `job["scale"]`."""

    def __init__(self, code: Code, slots: Any, kinds: Mapping[str, Any]):
        self.code, self.slots, self.kinds = code, slots, kinds

    def __getitem__(self, name: str) -> Any:
        return self.code.load(self._address(name), kind=self.kinds[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self.code.store(value, self._address(name))

    def _address(self, name):
        return self.code.address(self.slots, _FIRST + list(self.kinds).index(name), INT)

    @property
    def shared(self) -> Any:
        """Address of the memory that all threads share, at first zero."""
        return self.code.load(self.slots, _SHARED, POINTER)

    def example_of(self, argument: str, example: Any) -> Any:
        """Index of the example of an argument that belongs to `example` of the first result.

        Batch axes of length 1 are broadcast.
        """
        code, builder = self.code, self.code.builder
        found, stride, rest = code.variable(0), code.variable(1), code.variable(example)
        with code.loop(0, self["batch_axes"]) as n:
            axis = code.sub(code.sub(self["batch_axes"], 1), n)
            own = code.load(self[_sizes_of(argument)], axis, INT)
            length = code.load(self["batch_sizes"], axis, INT)
            index = code.rem(code.get(rest), length)
            index = builder.select(code.less(1, own), index, INT(0))
            code.set(found, code.add(code.get(found), code.mul(index, code.get(stride))))
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
    integers: Sequence[str],
    floats: Sequence[str],
    begin: Callable[[Code, Frame, Job], tuple[Any, ...]],
    task: Callable[[Code, Job, Any, Any], None],
) -> None:
    """Generates a handler.

    Args:
      module: receives the handler.
      name: name of the handler.
      lanes: number of float32 in a vector.
      signature: buffers and attributes of the handler. The job has the arrays by name, and as
        "batch" the number of examples of the first result.
      integers: names of the other integers that the job has.
      floats: names of the float32 numbers that the job has.
      begin: generates the code that reads these values from a frame; returns the number of tasks,
        the size of each thread's scratch memory in float32 elements, and, if tasks use it, that of
        the memory that threads share.
      task: generates the code of a task, given its job, scratch memory and number.
    """
    arrays = *signature.arguments, *signature.results
    kinds: dict[str, Any] = {
        "bytes": INT,
        "batch": INT,
        "batch_axes": INT,
        "batch_sizes": POINTER,
        **{array.name: POINTER for array in arrays},
        **{_sizes_of(array.name): POINTER for array in signature.arguments},
        **dict.fromkeys(integers, INT),
        **dict.fromkeys(floats, FLOAT),
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
    stage = frame.field(frame.pointer, FRAME["stage"], INT32)
    with code.when(builder.icmp_signed("!=", stage, INT32(IS_EXECUTION))):
        builder.ret(NULL)
    frame.check(name, signature)
    slots = code.call("malloc", 8 * (_FIRST + len(kinds)))
    _refuse_if_null(code, frame, name, slots)
    job = Job(code, slots, kinds)
    _read_arrays(code, frame, job, signature)
    count, numbers, *shared = begin(code, frame, job)
    job["bytes"] = _bytes(code, numbers)
    memory = code.call("aligned_alloc", 64, job["bytes"])
    _refuse_if_null(code, frame, name, memory, slots)
    code.store(NULL, code.address(slots, _SHARED, POINTER))
    for size in shared:
        common = code.call("aligned_alloc", 64, _bytes(code, size))
        _refuse_if_null(code, frame, name, common, memory, slots)
        with code.loop(0, code.mul(code.ceil(size, 16), 16), lanes) as i:
            code.store_vector(code.number(0.0), common, i)
        code.store(common, code.address(slots, _SHARED, POINTER))
    helpers = code.sub(code.max(code.min(frame.threads(), count), 1), 1)
    entries = {_NEXT: 0, _COUNT: count, _HOLDERS: code.add(helpers, 1), _DONE: 0}
    for slot, value in entries.items():
        code.store(value, code.address(slots, slot, INT))
    with code.loop(0, helpers):
        scheduled = frame.schedule(help_with, slots)
        with code.when(builder.not_(scheduled)):
            _release(code, slots)
    code.call(work, slots, memory)
    code.call("free", memory)
    _wait(code, slots, count)
    _release(code, slots)
    builder.ret(NULL)


def _bytes(code, numbers):
    """Bytes of this many float32 in whole cache lines."""
    return code.mul(code.ceil(numbers, 16), 64)


def _refuse_if_null(code, frame, name, memory, *others):
    """Returns an error if an allocation failed, and frees the earlier allocations."""
    with code.when(code.builder.icmp_unsigned("==", memory, NULL)):
        for other in others:
            code.call("free", other)
        frame.refuse(RESOURCE_EXHAUSTED, f"{name}: out of memory")


def _read_arrays(code, frame, job, signature):
    """Reads the addresses of the arrays and the lengths of the batch axes into the job."""
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
    """Generates the function that runs tasks of a job in given memory until none is left."""
    code = Code(module, f"{name}_work", [POINTER, POINTER], lanes)
    (slots, memory), builder = code.arguments, code.builder
    count = code.load(slots, _COUNT, INT)
    head, body, after = (builder.append_basic_block(each) for each in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.atomic_rmw("add", code.address(slots, _NEXT, INT), INT(1), "monotonic")
    builder.cbranch(code.less(number, count), body, after)
    builder.position_at_end(body)
    code.call(task, slots, memory, number)
    builder.atomic_rmw("add", code.address(slots, _DONE, INT), INT(1), "release")
    builder.branch(head)
    builder.position_at_end(after)
    builder.ret_void()
    return code.function


def _write_help(module, name, lanes, kinds, work):
    """Generates the function that a helper, another thread of the pool, runs."""
    code = Code(module, f"{name}_help", [POINTER], lanes)
    (slots,) = code.arguments
    # A helper that comes after the last task needs no memory.
    taken = code.builder.load_atomic(code.address(slots, _NEXT, INT), "monotonic", 8, typ=INT)
    with code.when(code.less(taken, code.load(slots, _COUNT, INT))):
        memory = code.call("aligned_alloc", 64, Job(code, slots, kinds)["bytes"])
        with code.when(code.builder.icmp_unsigned("!=", memory, NULL)):
            code.call(work, slots, memory)
            code.call("free", memory)
    _release(code, slots)
    code.builder.ret_void()
    return code.function


def _wait(code, slots, count):
    """Waits until the tasks that other threads have begun are done."""
    builder = code.builder
    wait, done = (builder.append_basic_block(each) for each in ("wait", "done"))
    builder.branch(wait)
    builder.position_at_end(wait)
    finished = builder.load_atomic(code.address(slots, _DONE, INT), "acquire", 8, typ=INT)
    code.call("sched_yield")
    builder.cbranch(code.less(finished, count), wait, done)
    builder.position_at_end(done)


def _release(code, slots):
    """Releases the thread's hold on the job; the last holder frees the job."""
    holders = code.builder.atomic_rmw("sub", code.address(slots, _HOLDERS, INT), INT(1), "acq_rel")
    with code.when(code.builder.icmp_signed("==", holders, INT(1))):
        code.call("free", code.load(slots, _SHARED, POINTER))
        code.call("free", slots)
