"""The structure that XLA calls a handler with, as generated code reads and checks it."""

from typing import Any

from llvmlite import ir

from effattn.llvm.code import BYTE, INT, INT32, NULL, POINTER, Code
from effattn.llvm.interface import (
    API,
    ARRAY,
    BUFFER,
    DTYPES,
    EXTENSION,
    FAILED_PRECONDITION,
    FRAME,
    INVALID_ARGUMENT,
    IS_ARRAY,
    IS_METADATA,
    IS_SCALAR,
    METADATA,
    SCALAR,
    SIZES,
    VERSION,
    Signature,
)


class Frame:
    """Code that reads a frame, and returns errors of XLA."""

    def __init__(self, code: Code, pointer: Any):
        self.code, self.pointer = code, pointer

    def of(self, structure: Any, offset: int, kind: Any = POINTER) -> Any:
        """The field that lies so many bytes into a structure."""
        return self.code.load(self.code.place(structure, offset, BYTE), kind=kind)

    def own(self, name: str, number: int | None = None) -> Any:
        """A field of the frame, or entry `number` of the list in that field."""
        found = self.of(self.pointer, FRAME[name])
        return found if number is None else self.code.load(found, number, POINTER)

    def data(self, kind: str, number: int) -> Any:
        """The entries of one of the "arguments" or "results"."""
        return self.of(self.own(kind, number), BUFFER["data"])

    def sizes(self, kind: str, number: int) -> Any:
        """The lengths of all axes of an argument or result: an array of 64-bit integers."""
        return self.of(self.own(kind, number), BUFFER["sizes"])

    def rank(self, kind: str, number: int) -> Any:
        """The number of axes of an argument or result."""
        return self.of(self.own(kind, number), BUFFER["rank"], INT)

    def last_sizes(self, argument: int, count: int) -> list[Any]:
        """The lengths of the last `count` axes of an argument."""
        first = self.code.sub(self.rank("arguments", argument), count)
        sizes = self.sizes("arguments", argument)
        return [self.code.load(sizes, self.code.add(first, axis), INT) for axis in range(count)]

    def integers(self, count: int) -> list[Any]:
        """The entries of the attribute `limits`."""
        data = self.of(self.own("attributes", 0), ARRAY["data"])
        return [self.code.load(data, number, INT) for number in range(count)]

    def scale(self) -> Any:
        """The attribute `scale`."""
        return self.code.load(self.of(self.own("attributes", 1), SCALAR["value"]))

    def threads(self) -> Any:
        """The number of threads in XLA's pool; 1 where there is no pool."""
        count = self.code.slots(1)
        well = self._went_well(self._call("count threads", self.own("context"), count))
        return self.code.builder.select(well, self.code.load(count, kind=INT), INT(1))

    def schedule(self, function: ir.Function, data: Any) -> Any:
        """Has a thread of the pool call the function of the data; whether one will."""
        return self._went_well(self._call("schedule", self.own("context"), function, data))

    # Errors

    def answer_version(self) -> None:
        """Returns the interface's version where XLA asks for it, as it registers the handler."""
        code, builder, extension = self.code, self.code.builder, self.own("extension")
        with code.when(builder.icmp_unsigned("!=", extension, NULL)):
            kind = self.of(extension, EXTENSION["kind"], INT32)
            with code.when(builder.icmp_signed("==", kind, INT32(IS_METADATA))):
                metadata = self.of(extension, EXTENSION["metadata"])
                for offset, value in zip(METADATA.values(), (*VERSION, 0), strict=True):
                    code.store(INT32(value), code.place(metadata, offset, BYTE))
                builder.ret(NULL)

    def check(self, name: str, signature: Signature) -> None:
        """Returns an error unless the call is one that the handler was written for."""
        unlike = self.code.builder.icmp_signed
        api = self.own("api")
        major = self.of(api, API["major"], INT32)
        minor = self.of(api, API["minor"], INT32)
        version = f"{name}: this jaxlib has another version of XLA's foreign-function interface"
        for wrong in (
            self.code.less(self.of(self.pointer, 0, INT), SIZES["frame"]),
            self.code.less(self.of(api, 0, INT), SIZES["api"]),
            unlike("!=", major, INT32(VERSION[0])),
            unlike("<", minor, INT32(VERSION[1])),
        ):
            self._refuse_if(wrong, FAILED_PRECONDITION, version)
        self._check_attributes(name, signature.integers)
        for kind in ("argument", "result"):
            arrays = getattr(signature, f"{kind}s")
            count = self.of(self.pointer, FRAME[f"{kind} count"], INT)
            wrong = unlike("!=", count, INT(len(arrays)))
            self._refuse_if(wrong, INVALID_ARGUMENT, f"{name}: needs {len(arrays)} {kind}s")
        batch = self.code.sub(self.rank("results", 0), signature.results[0].axes)
        self._refuse_if(
            self.code.less(batch, 0), INVALID_ARGUMENT, f"{name}: its first result lacks axes"
        )
        for kind in ("arguments", "results"):
            for number, array in enumerate(getattr(signature, kind)):
                buffer, wanted = self.own(kind, number), INT32(DTYPES[array.dtype])
                needs = f"{name}: {array.name} must be {array.dtype}"
                dtype = self.of(buffer, BUFFER["dtype"], INT32)
                rank = self.code.add(batch, array.axes)
                for wrong, message in (
                    (self.code.less(self.of(buffer, 0, INT), SIZES["buffer"]), version),
                    (unlike("!=", dtype, wanted), needs),
                    (
                        unlike("!=", self.rank(kind, number), rank),
                        f"{needs} with {array.axes} axes beside the batch axes",
                    ),
                ):
                    self._refuse_if(wrong, INVALID_ARGUMENT, message)

    def refuse(self, status: int, message: str) -> None:
        """Returns an error with this message."""
        text = self.code.text(message)
        self.code.builder.ret(self._call("create error", text, status))

    def _refuse_if(self, wrong, status, message):
        with self.code.when(wrong):
            self.refuse(status, message)

    def _check_attributes(self, name, integers):
        unlike = self.code.builder.icmp_signed
        kinds = [IS_ARRAY, IS_SCALAR] if integers else []
        message = f"{name}: needs the attributes limits, {integers} int64, and scale, float32"
        count = self.of(self.pointer, FRAME["attribute count"], INT)
        self._refuse_if(unlike("!=", count, INT(len(kinds))), INVALID_ARGUMENT, message)
        for number, kind in enumerate(kinds):
            found = self.code.load(self.own("attribute types"), number, INT32)
            self._refuse_if(unlike("!=", found, INT32(kind)), INVALID_ARGUMENT, message)
            dtype = self.of(self.own("attributes", number), 0, INT32)
            wanted = DTYPES["int64" if kind == IS_ARRAY else "float32"]
            self._refuse_if(unlike("!=", dtype, INT32(wanted)), INVALID_ARGUMENT, message)
        if integers:
            size = self.of(self.own("attributes", 0), ARRAY["size"], INT)
            self._refuse_if(unlike("!=", size, INT(integers)), INVALID_ARGUMENT, message)

    def _call(self, name, *fields):
        """XLA's function of a structure with these fields; an error, or null."""
        code = self.code
        structure = code.slots(2 + len(fields))
        for number, field in enumerate((8 * (2 + len(fields)), 0, *fields)):
            code.store(field, code.place(structure, number, INT))
        kind = ir.FunctionType(POINTER, [POINTER])
        function = self.of(self.own("api"), API[name], kind.as_pointer())
        return code.builder.call(function, [structure])

    def _went_well(self, error):
        failed = self.code.builder.icmp_unsigned("!=", error, NULL)
        with self.code.when(failed):
            self._call("destroy error", error)
        return self.code.builder.not_(failed)
